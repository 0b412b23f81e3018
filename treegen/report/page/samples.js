// The samples of a run: a list that is filtered and searched, and one sample in full.

// How a status is drawn; a run has its own words for them.
const STATUS = ["wrong", "right", "invalid", "not-judged"];
const fateMark = (run, status) => make("span", `mark ${STATUS[status]}`, run.index.fates[status] ?? "not judged");

class Samples {
  constructor(run, box) {
    Object.assign(this, { run, box, turn: 0 });
    const { samples, filters, finishes } = run.index;
    this.columns = samples;
    this.all = Uint32Array.from(samples.problem, (_, i) => i);
    this.control = {};
    const controls = box.querySelector(".controls");
    this.add(controls, "filter", "read by", filters.map((f) => f.name), filters.length > 1);
    this.add(controls, "status", "is", ["any", ...run.index.fates], filters.length > 0);
    // A sample that reached its limit is a truncated one.
    const ends = finishes.map((name) => (name.startsWith("length") ? `${name} (truncated)` : name));
    this.add(controls, "finish", "ended by", ["any", ...ends], true);
    const outcomes = [...new Set(filters.flatMap((f) => f.outcomes))];
    this.add(controls, "outcome", "verdict", ["any", ...outcomes], outcomes.length > 0);
    this.add(controls, "vote", "vote", ["any", "tied", "won", "lost"], run.index.votes);
    this.control.problem = make("input", "", [], { type: "search", placeholder: "problem" });
    this.control.text = make("input", "", [], { type: "search", placeholder: "text in the sample" });
    for (const name of ["problem", "text"]) {
      this.control[name].setAttribute("aria-label", this.control[name].placeholder);
      this.control[name].addEventListener("input", () => this.soon());
      controls.append(this.control[name]);
    }
    this.told = box.querySelector(".told");
    this.detail = box.querySelector(".detail");
    this.list = new LongList(box.querySelector(".list"), {
      row: (sample) => this.row(sample),
      choose: (sample) => this.open(sample),
    });
    this.apply();
  }

  add(controls, name, label, options, shown) {
    const choices = options.map((option) => make("option", "", option, { value: option }));
    const select = make("select", "", choices, { onchange: () => this.apply() });
    select.name = name;
    this.control[name] = select;
    if (shown) controls.append(make("label", "", [`${label} `, select]));
  }

  get filter() {
    return this.run.index.filters[Math.max(0, this.control.filter.selectedIndex)];
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.apply(), 150);
  }

  // Shows the samples that are asked for; those with a text as their parts are searched.
  async apply() {
    const turn = ++this.turn;
    const { status, finish, outcome, vote } = this.control;
    const [problem, text] = ["problem", "text"].map((name) => this.control[name].value.toLowerCase());
    const { columns, filter } = this;
    const ids = this.run.index.problems.id;
    const wanted = ids.map((id) => id.toLowerCase().includes(problem));
    const finished = finish.selectedIndex - 1;
    const digit = String(status.selectedIndex - 1);
    const judged = filter ? filter.outcomes.indexOf(outcome.value) : -1;
    const votes = { any: 0, tied: 1, won: 2, lost: 3 }[vote.value];
    let found = this.all.filter(
      (i) =>
        wanted[columns.problem[i]] &&
        (finished < 0 || columns.finish[i] === finished) &&
        (digit === "-1" || filter.status[i] === digit) &&
        (outcome.value === "any" || (judged >= 0 && filter.outcome[i] === judged)) &&
        (votes === 0 || filter.vote[columns.problem[i]] === votes),
    );
    if (text === "") {
      this.list.show(found);
      this.tell(found.length);
      return;
    }
    const hits = [];
    this.list.show(hits);
    const { texts } = this.run;
    let pause = performance.now();
    for (let at = 0; at < found.length; ) {
      const part = texts.partOf(found[at]);
      const start = texts.starts[part];
      const items = await texts.part(part);
      if (turn !== this.turn) return; // asked for something else meanwhile
      for (; at < found.length && found[at] - start < items.length; at++) {
        if (items[found[at] - start].toLowerCase().includes(text)) hits.push(found[at]);
      }
      if (performance.now() - pause > 30) {
        this.tell(hits.length, `, searched ${Math.round((100 * at) / found.length)}%`);
        this.list.draw();
        await new Promise((resume) => setTimeout(resume));
        pause = performance.now();
      }
    }
    if (turn !== this.turn) return;
    this.list.draw();
    this.tell(hits.length);
  }

  tell(number, more = "") {
    this.told.textContent = `${count(number)} of ${count(this.all.length)} ${this.run.index.unit}${more}`;
  }

  status(sample) {
    return this.filter ? Number(this.filter.status[sample]) : 3;
  }

  answer(sample) {
    const answer = this.filter?.answer[sample] ?? -1;
    return answer < 0 ? "" : this.filter.answers[answer];
  }

  name(sample) {
    return `${this.run.index.problems.id[this.columns.problem[sample]]} #${this.columns.index[sample]}`;
  }

  row(sample) {
    const { texts } = this.run;
    const part = texts.partOf(sample);
    const items = texts.peek(part);
    if (!items) texts.part(part).then(() => this.redraw());
    const text = items ? items[sample - texts.starts[part]].slice(0, 300).replace(/\s+/g, " ") : "\u2026";
    return make("div", "", [
      fateMark(this.run, this.status(sample)),
      make("bdi", "name", this.name(sample)),
      make("bdi", "answer", this.answer(sample)),
      make("span", "number", `${count(this.columns.tokens[sample])} tok`),
      make("bdi", "snippet", text),
    ]);
  }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.list.draw());
  }

  async open(sample) {
    const problem = this.columns.problem[sample];
    const [text, [question, reference]] = await Promise.all([
      this.run.texts.get(sample),
      this.run.problems.get(problem),
    ]);
    const facts = [
      `${count(this.columns.tokens[sample])} tokens`,
      `logprob ${short(this.columns.logprob[sample])}`,
      `ended by ${this.run.index.finishes[this.columns.finish[sample]]}`,
    ];
    const prompt = this.run.index.problems.prompt_tokens[problem];
    if (prompt > 0) facts.push(`prompt ${count(prompt)} tokens`);
    const readings = this.run.index.filters.map((filter) => {
      const answer = filter.answer[sample] < 0 ? "no answer" : filter.answers[filter.answer[sample]];
      const outcome = filter.outcome[sample] >= 0 ? `, ${filter.outcomes[filter.outcome[sample]]}` : "";
      return make("div", "reading", [
        fateMark(this.run, Number(filter.status[sample])),
        `${filter.name}${outcome}: `,
        make("bdi", "", answer),
      ]);
    });
    this.detail.replaceChildren(
      make("h4", "", make("bdi", "", this.name(sample))),
      make("p", "facts", facts.map((fact) => make("span", "fact", fact))),
      ...readings,
      ...this.parts(sample, text),
      ...(question ? [make("h5", "", "Question"), textBlock(question)] : []),
      ...(reference ? [make("h5", "", "Reference"), textBlock(reference, 1000)] : []),
      ...this.votes(problem, this.filter?.answer[sample]),
    );
    this.detail.hidden = false;
  }

  // The text of a sample; its thinking is folded.
  parts(sample, text) {
    const start = this.columns.answer_at?.[sample] ?? -1;
    if (start < 0) {
      const title = this.run.index.unit === "searches" ? "Best path" : "Sample";
      return [make("h5", "", title), textBlock(text, 20000)];
    }
    const tokens = `Thinking, ${count(this.columns.thinking[sample])} tokens`;
    const folded = make("details", "", [make("summary", "", tokens), textBlock(text.slice(0, start), 20000)]);
    return [folded, make("h5", "", "Answer"), textBlock(text.slice(start).replace(/^\n+/, ""), 20000)];
  }

  votes(problem, mine) {
    const { filter, columns } = this;
    if (!filter || !this.run.index.votes) return [];
    const counts = new Map();
    for (let i = columns.first[problem]; i < columns.first[problem + 1]; i++) {
      const key = filter.answer[i];
      const vote = counts.get(key) ?? { number: 0, right: filter.status[i] === "1" };
      vote.number += 1;
      counts.set(key, vote);
    }
    const ranked = [...counts].sort((a, b) => (a[0] < 0) - (b[0] < 0) || b[1].number - a[1].number);
    const rows = ranked.slice(0, 30).map(([answer, { number, right }]) => {
      const label = answer < 0 ? "no answer" : filter.answers[answer];
      const kind = answer < 0 ? "invalid" : right ? "right" : "wrong";
      const bar = make("meter", kind, "", { min: 0, max: columns.first[problem + 1] - columns.first[problem], value: number });
      const row = make("div", answer === mine ? "vote mine" : "vote", [
        make("bdi", "answer", label), bar, make("span", "number", count(number)),
      ]);
      return row;
    });
    if (ranked.length > 30) rows.push(make("p", "", `and ${count(ranked.length - 30)} more answers`));
    const title = { 1: ", a tie", 2: ", won by a right answer", 3: ", lost" }[filter.vote[problem]] ?? "";
    return [make("h5", "", `Votes on this problem${title}`), ...rows];
  }
}
