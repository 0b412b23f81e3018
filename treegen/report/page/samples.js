// The samples of a run: a list with filters and text search, and one sample in full.

class Samples {
  // onShow(sample): called when a sample is shown in full.
  constructor(run, box, onShow) {
    Object.assign(this, { run, box, onShow, turn: 0 });
    const { samples, filters, finishes } = run.index;
    this.columns = samples;
    this.all = samples.problem.map((_, i) => i);
    this.control = {};
    const controls = box.querySelector(".controls");
    this.add(controls, "filter", "read by", filters.map((f) => f.name), filters.length > 1);
    this.add(controls, "status", "is", ["any", ...run.index.statuses], filters.length > 0);
    // "truncated" is the name of the metric of samples that reached max_tokens.
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
    }
    this.exact = make("input", "", [], { type: "checkbox", onchange: () => this.apply() });
    this.control.problem.addEventListener("input", () => (this.exact.checked = false));
    controls.append(
      this.control.problem, make("label", "check", [this.exact, "this problem only"]), this.control.text,
      button("export JSONL", (event) => this.export(event.target)),
    );
    this.rowCount = box.querySelector(".row-count");
    this.detail = box.querySelector(".detail");
    this.list = new LongList(box.querySelector(".list"), {
      row: (sample) => this.row(sample),
      choose: (sample) => this.open(sample),
    });
    this.apply();
  }

  add(controls, name, label, options, isVisible) {
    const choices = options.map((option) => make("option", "", option, { value: option }));
    const select = make("select", "", choices, { onchange: () => this.apply() });
    select.name = name;
    this.control[name] = select;
    if (isVisible) controls.append(make("label", "", [`${label} `, select]));
  }

  get filter() {
    return this.run.index.filters[Math.max(0, this.control.filter.selectedIndex)];
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.apply(), 150);
  }

  // Lists the samples that match the filters; a text search appends matches part by part.
  async apply() {
    const turn = ++this.turn;
    const { status, finish, outcome, vote } = this.control;
    const [problem, text] = ["problem", "text"].map((name) => this.control[name].value.toLowerCase());
    const exact = this.exact.checked ? this.control.problem.value : null;
    const { columns, filter } = this;
    const ids = this.run.index.problems.id;
    const isSelected = ids.map((id) => (exact === null ? id.toLowerCase().includes(problem) : id === exact));
    const finished = finish.selectedIndex - 1;
    const digit = String(status.selectedIndex - 1);
    const judged = filter ? filter.outcomes.indexOf(outcome.value) : -1;
    const votes = { any: 0, tied: 1, won: 2, lost: 3 }[vote.value];
    let matches = this.all.filter(
      (i) =>
        isSelected[columns.problem[i]] &&
        (finished < 0 || columns.finish[i] === finished) &&
        (digit === "-1" || filter.status[i] === digit) &&
        (outcome.value === "any" || (judged >= 0 && filter.outcome[i] === judged)) &&
        (votes === 0 || filter.vote[columns.problem[i]] === votes),
    );
    if (text === "") {
      this.list.show(matches, matches.indexOf(this.current ?? -1));
      this.tell(matches.length);
      return;
    }
    const hits = [];
    this.list.show(hits);
    const { texts } = this.run;
    let pause = performance.now();
    for (let at = 0; at < matches.length; ) {
      const part = texts.partOf(matches[at]);
      const start = texts.starts[part];
      const items = await texts.part(part);
      if (turn !== this.turn) return; // the user has changed the filters in the meantime
      for (; at < matches.length && matches[at] - start < items.length; at++) {
        if (items[matches[at] - start].toLowerCase().includes(text)) hits.push(matches[at]);
      }
      if (performance.now() - pause > 30) {
        this.tell(hits.length, `, searched ${Math.round((100 * at) / matches.length)}%`);
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
    this.rowCount.textContent = `${count(number)} of ${count(this.all.length)} ${this.run.index.unit}${more}`;
  }

  status(sample) {
    return this.filter ? Number(this.filter.status[sample]) : 3;
  }

  row(sample) {
    const { texts } = this.run;
    const part = texts.partOf(sample);
    const items = texts.peek(part);
    if (!items) texts.part(part).then(() => this.redraw());
    const text = items ? items[sample - texts.starts[part]].slice(0, 300).replace(/\s+/g, " ") : "\u2026";
    return make("div", "", [
      statusMark(this.run, this.status(sample)),
      make("bdi", "name", sampleName(this.run, sample)),
      make("bdi", "answer", answerOf(this.filter, sample) ?? ""),
      make("span", "number", `${count(this.columns.tokens[sample])} tok`),
      make("bdi", "snippet", text),
    ]);
  }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.list.draw());
  }

  // Lists the samples of one problem, and shows the sample with an index, or else the first.
  async go(problem, index) {
    for (const select of Object.values(this.control)) if (select.tagName === "SELECT" && select.name !== "filter") select.selectedIndex = 0;
    this.control.text.value = "";
    this.control.problem.value = problem;
    this.exact.checked = true;
    await this.apply();
    const at = this.list.items.findIndex((i) => index === undefined || this.columns.index[i] === index);
    if (this.list.items.length) await this.list.pick(Math.max(0, at));
    else await this.openProblem(this.run.index.problems.id.indexOf(problem));
  }

  // Shows a problem that has no samples yet.
  async openProblem(problem) {
    const { run } = this;
    this.opening = (this.opening ?? 0) + 1;
    this.current = undefined;
    this.detail.hidden = problem < 0;
    if (problem < 0) return;
    const texts = await run.problems.get(problem);
    const name = make("bdi", "", run.index.problems.id[problem]);
    this.detail.replaceChildren(heading(run, 2, name), ...problemText(run, ...texts, problemImages(run, problem)));
  }

  async open(sample) {
    const { run, filter } = this;
    const problem = this.columns.problem[sample];
    const turn = (this.opening = (this.opening ?? 0) + 1);
    const [text, [question, reference]] = await Promise.all([run.texts.get(sample), run.problems.get(problem)]);
    if (turn !== this.opening) return; // the user has opened another sample in the meantime
    this.detail.replaceChildren(
      heading(run, 2, make("bdi", "", sampleName(run, sample))),
      ...problemText(run, question, reference, problemImages(run, problem)),
      ...sampleFacts(run, filter, sample),
      ...sampleText(run, sample, text, answerOf(filter, sample)),
      ...votesOf(run, filter, problem, filter?.answer[sample]),
    );
    this.detail.hidden = false;
    this.current = sample;
    this.onShow(sample);
  }

  // Exports the listed samples as JSONL.
  async export(pressed) {
    pressed.disabled = true;
    const lines = [];
    const { run, columns } = this;
    for (const i of this.list.items) {
      const verdicts = run.index.filters.map((filter) => [
        filter.name,
        { answer: answerOf(filter, i), verdict: run.index.statuses[Number(filter.status[i])] ?? "not judged" },
      ]);
      const record = {
        problem_id: run.index.problems.id[columns.problem[i]],
        sample_index: columns.index[i],
        text: await run.texts.get(i),
        num_tokens: columns.tokens[i],
        logprob: columns.logprob[i],
        finish_reason: run.index.finishes[columns.finish[i]],
        verdicts: Object.fromEntries(verdicts),
      };
      lines.push(`${JSON.stringify(record)}\n`);
    }
    save(`${run.name}-${run.index.unit}.jsonl`, lines, "application/jsonl");
    pressed.disabled = false;
  }
}
