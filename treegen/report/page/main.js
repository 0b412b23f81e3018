// Creates the parts of the page, and shows the state that the URL names.

const readRun = async (article) => {
  const key = article.id;
  const index = JSON.parse(await unpack(`${key}-index`));
  countSamples(index.samples);
  const { name, level } = article.dataset;
  return {
    key, name, level: Number(level), index,
    texts: new Parts(`${key}-texts`, index.text_starts, index.samples.problem.length),
    problems: new Parts(`${key}-problems`, index.problem_starts, index.problems.id.length),
    trees: new Parts(`${key}-trees`, index.tree_starts, index.trees.length),
    images: new Parts(`${key}-images`, index.image_starts, index.num_images),
  };
};

class RunPage {
  constructor(run, article, page) {
    Object.assign(this, { run, article, page });
    const { index } = run;
    const part = (name) => article.querySelector(`.${name}`);
    if (part("samples")) {
      this.samples = new Samples(run, part("samples"), (sample) => this.shown(sample));
    }
    if (part("problems")) {
      this.problems = new Table(part("problems"), {
        columns: problemColumns(run), total: index.problems.id.length, unit: "problems", name: run.name,
        choose: (row) => this.samples?.go(index.problems.id[row]),
      });
    }
    if (part("searches")) {
      this.searches = new Searches(run, part("searches"), (tree) => {
        const { problem_id, index: search } = index.trees[tree];
        page.note({ ...this.state, problem: problem_id, search });
      });
    }
    PlotLinks.add(article.querySelectorAll("figure"), index.links, this.target);
  }

  // Where a bar or point of a plot links to: a problem, or the problems that match a filter.
  get target() {
    const { id } = this.run.index.problems;
    const target = (place) => (typeof place === "string" ? { problems: place } : { problem: id[place] });
    return {
      state: (place) => ({ ...this.state, ...target(place) }),
      label: (place) => (typeof place === "string" ? `problems with ${place}` : id[place]),
    };
  }

  get state() {
    return this.page.several ? { run: this.run.name } : {};
  }

  shown(sample) {
    const { samples, problems } = this.run.index;
    const problem = samples.problem[sample];
    this.problems?.mark(problem);
    this.page.note({ ...this.state, problem: problems.id[problem], sample: samples.index[sample] });
  }

  async begin() {
    if (this.searches) await this.searches.table.list.pick(0);
    const prompts = this.article.querySelector(".prompts .tree");
    if (prompts) await promptTree(this.run, prompts);
  }

  async go({ problem, sample, search, problems }) {
    if (problems !== undefined && this.problems) {
      this.problems.ask(problems);
      this.article.querySelector(".problems").scrollIntoView();
    }
    if (problem === undefined) return;
    const lacking = this.lacking(problem, sample, search);
    if (lacking) {
      if (!this.run.index.problems.id.includes(problem)) await this.samples?.go(problem); // lists none
      for (const part of [this.samples, this.searches]) if (part) part.detail.hidden = true;
      this.page.tell(lacking);
      return;
    }
    const searched = this.searches && (search !== undefined || (sample === undefined && this.run.index.unit === "searches"));
    if (searched) {
      await this.searches.go(problem, Number(search ?? 0));
    } else if (this.samples) {
      this.problems?.find(this.run.index.problems.id.indexOf(problem));
      await this.samples.go(problem, sample);
    }
    this.article.querySelector(searched ? ".searches" : ".samples")?.scrollIntoView();
  }

  // Returns a message about what the URL names but the run lacks; nothing if the run has all of it.
  lacking(problem, sample, search) {
    const { problems, samples, trees } = this.run.index;
    const place = problems.id.indexOf(problem);
    if (place < 0) return `The run ${this.run.name} has no problem ${problem}.`;
    const drawn = samples.index.slice(samples.first[place], samples.first[place + 1]);
    // Show a problem without samples by itself.
    if (sample !== undefined && drawn.length && !drawn.includes(sample)) {
      return `Problem ${problem} of the run ${this.run.name} has no sample ${sample}.`;
    }
    const searches = trees.filter((tree) => tree.problem_id === problem);
    if (search !== undefined && !searches.some((tree) => tree.index === Number(search))) {
      return `Problem ${problem} of the run ${this.run.name} has no search ${search}.`;
    }
    return "";
  }

  // Handles single-letter shortcuts, as mail programs have.
  onkey(key) {
    const table = this.problems ?? this.searches?.table;
    const list = this.samples?.list;
    const act = {
      j: () => list?.move(1), k: () => list?.move(-1), n: () => table?.list.move(1), p: () => table?.list.move(-1),
      "/": () => this.samples?.control.text.focus(), f: () => table?.query.focus(),
    }[key];
    act?.();
    return Boolean(act);
  }
}

class Page {
  constructor() {
    this.articles = new Map([...document.querySelectorAll("article")].map((article) => [article.id, article]));
    this.runs = new Map();
    // The keys of runs by their names in a URL: run-2 is the second run, unless a run has this name.
    this.keys = new Map([...this.articles.keys()].map((key) => [key, key]));
    for (const [key, article] of this.articles) this.keys.set(article.dataset.name, key);
    this.several = this.articles.size > 1;
    this.quiet = true; // the initial state is not written to the URL
  }

  // Returns the data of a run, reading it only once.
  peek(key) {
    if (!this.runs.has(key)) this.runs.set(key, readRun(this.articles.get(key)));
    return this.runs.get(key);
  }

  // Returns the page of a run, building it on first use.
  async open(key) {
    const article = this.articles.get(key);
    const run = await this.peek(key);
    run.page ??= new RunPage(run, article, this);
    run.begun ??= run.page.begin();
    await run.begun;
    article.dataset.ready = "";
    return run.page;
  }

  // Shows one of several runs and hides the others.
  async show(key) {
    for (const [runKey, article] of this.articles) article.classList.toggle("shown", runKey === key);
    for (const link of document.querySelectorAll("nav.runs a")) {
      if (link.dataset.run === key) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const page = await this.open(key);
    if (this.isShown(key)) this.current = page; // the user may have chosen another run in the meantime
  }

  isShown(key) {
    return !this.several || this.articles.get(key).classList.contains("shown");
  }

  note(state) {
    if (this.quiet) return;
    if (state.run !== undefined && !this.isShown(this.keys.get(state.run))) return; // the user has left it
    this.tell("");
    noteAddress(state);
  }

  // Shows a message about a URL that names something unknown; an empty text hides it.
  tell(text) {
    const notice = document.querySelector(".unknown");
    notice.textContent = text;
    notice.hidden = text === "";
    if (text === "") return;
    stopNoting();
    notice.scrollIntoView();
  }

  // Hides all runs, because the URL names a run that this page does not have.
  refuse(name) {
    for (const article of this.articles.values()) article.classList.remove("shown");
    for (const link of document.querySelectorAll("nav.runs a")) link.removeAttribute("aria-current");
    if (this.several) this.current = undefined;
    const names = [...this.articles.values()].map((article) => article.dataset.name);
    this.tell(`This page has no run named ${name}. Its runs: ${names.join(", ")}.`);
  }

  async go(state) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const [first] = this.articles.keys();
    const key = state.run === undefined ? (this.current?.run.key ?? first) : this.keys.get(state.run);
    if (key === undefined) {
      this.refuse(state.run);
      return;
    }
    this.tell("");
    await this.show(key);
    if (turn !== this.turn) return; // the user has gone elsewhere in the meantime
    if (this.several && state.run === undefined) await this.comparison?.go(state);
    else if (state.problem !== undefined || state.problems !== undefined) await this.current.go(state);
    else if (state.run !== undefined) this.articles.get(key).scrollIntoView();
  }

  onkey(event) {
    if (event.key === "Escape") document.activeElement?.blur();
    const typing = event.target.closest?.("input, select, textarea");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = document.querySelector(".keys");
    if (event.key === "?" && keys) keys.open = !keys.open;
    else if (!this.comparison?.onkey(event) && !this.current?.onkey(event.key)) return;
    event.preventDefault();
  }

  async begin() {
    document.body.classList.toggle("several", this.several);
    // Links and keys work while the browser still loads the runs.
    window.addEventListener("hashchange", () => this.go(readAddress()));
    document.addEventListener("keydown", (event) => this.onkey(event));
    const state = readAddress();
    const [first] = this.articles.keys();
    const key = state.run === undefined || !this.several ? first : this.keys.get(state.run);
    if (key !== undefined) await this.show(key);
    const box = document.querySelector(".comparison");
    if (box) {
      this.comparison = await Comparison.open(this, box);
      box.dataset.ready = "";
    }
    this.quiet = false;
    const { run } = readAddress();
    // An address that names a run and was chosen in the meantime is shown already.
    if (location.hash && (!this.turn || run === undefined)) await this.go(readAddress());
    keepFresh();
  }
}

new Page().begin();
