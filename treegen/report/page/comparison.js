// The comparison of several runs: a table with the accuracy of each run on each problem, and samples
// of two runs side by side.

class Comparison {
  static async open(page, box) {
    const runs = await Promise.all([...page.articles.keys()].map((key) => page.peek(key)));
    return new Comparison(page, box, runs);
  }

  constructor(page, box, runs) {
    Object.assign(this, { page, box, runs });
    this.places = runs.map((run) => new Map(run.index.problems.id.map((id, place) => [id, place])));
    this.ids = [...new Set(runs.flatMap((run) => run.index.problems.id))];
    this.table = new Table(box, {
      columns: this.columns(), total: this.ids.length, unit: "problems", name: "runs",
      choose: (row) => this.open(this.ids[row]),
    });
    const labels = ["left", "right"];
    this.selects = labels.map((label, side) => {
      const select = make("select", "", runs.map((run) => make("option", "", run.name)), { onchange: () => this.open(this.problem) });
      select.selectedIndex = side;
      select.setAttribute("aria-label", `run on the ${label}`);
      return select;
    });
    this.detail = box.querySelector(".beside");
    PlotLinks.add(document.querySelectorAll("body > .plots figure"), JSON.parse(box.dataset.links), {
      state: (place) => ({ problem: this.ids[place] }), label: (place) => this.ids[place],
    });
  }

  value(side, id) {
    const { index } = this.runs[side];
    const place = this.places[side].get(id);
    return place === undefined ? null : (index.filters[0]?.right[place] ?? null);
  }

  columns() {
    const { runs, ids } = this;
    const questionOf = new Map(runs.flatMap(({ index }) => index.problems.id.map((id, i) => [id, index.problems.question[i]])));
    const of = (side) => (row) => this.value(side, ids[row]);
    const columns = [
      { key: "problem", of: (row) => ids[row], width: "minmax(7rem, 11rem)" },
      ...runs.map((run, side) => ({ key: run.name, of: of(side), show: fixed(3), width: "minmax(5.7rem, 8rem)" })),
    ];
    if (runs.length === 2) {
      const difference = (row) => {
        const [a, b] = [of(0)(row), of(1)(row)];
        return a === null || b === null ? null : b - a;
      };
      const signed = (value) => `${["\u2212", "", "+"][1 + Math.sign(value)]}${Math.abs(value).toFixed(3)}`;
      columns.push({ key: "difference", of: difference, show: signed, width: "6rem" });
    }
    columns.push({ key: "question", of: (row) => questionOf.get(ids[row]) ?? "", width: "minmax(14rem, 1fr)" });
    return columns;
  }

  async go({ problem, sample, problems }) {
    if (problems !== undefined) this.table.ask(problems);
    if (problem === undefined) return;
    if (!this.ids.includes(problem)) {
      this.detail.hidden = true;
      this.page.tell(`No run of this page has a problem ${problem}.`);
      return;
    }
    this.table.find(this.ids.indexOf(problem));
    await this.open(problem, sample);
    this.detail.scrollIntoView();
  }

  // Shows a problem. sample: the index of the sample to show of both runs.
  async open(problem, sample = 0) {
    if (problem === undefined) return;
    const turn = (this.opening = (this.opening ?? 0) + 1);
    const sides = this.selects.map((select) => select.selectedIndex);
    const origin = sides.find((side) => this.places[side].has(problem)) ?? this.places.findIndex((place) => place.has(problem));
    if (origin < 0) return;
    const run = this.runs[origin];
    const [question, reference] = await run.problems.get(this.places[origin].get(problem));
    const sections = await Promise.all(sides.map((side, at) => this.side(side, problem, sample, at)));
    if (turn !== this.opening) return; // the user has opened another problem in the meantime
    Object.assign(this, { problem, sample });
    const step = (by) => button(by < 0 ? "\u25c2 sample" : "sample \u25b8", () => this.move(by));
    const level = { level: 1 };
    this.detail.replaceChildren(
      heading(level, 2, make("bdi", "", problem)),
      ...problemText(level, question, reference, problemImages(run, this.places[origin].get(problem))),
      make("div", "controls", [step(-1), make("span", "number", `#${sample}`), step(1)]),
      make("div", "sides", sections),
    );
    this.detail.hidden = false;
    this.page.note({ problem, sample });
  }

  async side(side, problem, sampleIndex, at) {
    const run = this.runs[side];
    const { samples, filters } = run.index;
    const place = this.places[side].get(problem);
    const link = make("a", "", "in its run", { href: addressOf({ run: run.name, problem }) });
    const head = make("div", "controls", [this.selects[at], link]);
    const none = make("p", "faint", "no sample here");
    if (place === undefined) return make("section", "side", [head, none]);
    const [first, end] = [samples.first[place], samples.first[place + 1]];
    const row = samples.index.indexOf(sampleIndex, first);
    const [filter] = filters;
    const level = { ...run, level: 1 };
    const votes = votesOf(level, filter, place, row < 0 || row >= end ? undefined : filter?.answer[row]);
    if (row < 0 || row >= end) return make("section", "side", [head, none, ...votes]);
    const text = await run.texts.get(row);
    return make("section", "side", [
      head, ...sampleFacts(level, filter, row), ...sampleText(level, row, text, answerOf(filter, row)), ...votes,
    ]);
  }

  move(by) {
    // The indices of a problem's samples ascend, and an unfinished run may lack some.
    const last = this.selects.map((select) => {
      const { samples } = this.runs[select.selectedIndex].index;
      const place = this.places[select.selectedIndex].get(this.problem);
      const end = samples.first[place + 1] ?? 0;
      return end > samples.first[place] ? samples.index[end - 1] : 0;
    });
    return this.open(this.problem, Math.max(0, Math.min(Math.max(...last), this.sample + by)));
  }

  // Handles single-letter keys while the focus or the pointer is in this part of the page.
  onkey(event) {
    if (!this.box.contains(event.target) && !this.box.matches(":hover")) return false;
    const act = {
      j: () => this.problem !== undefined && this.move(1), k: () => this.problem !== undefined && this.move(-1),
      n: () => this.table.list.move(1), p: () => this.table.list.move(-1), f: () => this.table.query.focus(),
    }[event.key];
    act?.();
    return Boolean(act);
  }
}
