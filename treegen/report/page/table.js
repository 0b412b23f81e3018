// A table with sorting by columns and a text filter. Only the visible rows exist.

// A filter has words, which some text of the row must contain, and conditions such as accuracy<0.5
// or vote=lost. A word in quotes may contain blanks.
const CONDITION = /^([^<>=!]+)(<=|>=|!=|=|<|>)(.*)$/;
const COMPARE = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
  "=": (a, b) => a === b, "!=": (a, b) => a !== b,
};

const condition = (column, sign, operand) => {
  const number = operand.trim() === "" ? NaN : Number(operand);
  return (row) => {
    const value = column.of(row);
    if (typeof value === "number") return COMPARE[sign](value, number);
    if (sign !== "=" && sign !== "!=") return false;
    return COMPARE[sign](value ?? "", operand);
  };
};

// Returns a function that says whether a row matches a query.
const readFilter = (query, columns, exact) => {
  const unquote = (text) => text.replace(/"/g, "");
  const tests = (query.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? []).map((word) => {
    const [, name, sign, operand] = word.match(CONDITION) ?? [];
    const column = name && columns.find((column) => column.key === unquote(name));
    if (column) return condition(column, sign, unquote(operand));
    const text = exact ? unquote(word) : unquote(word).toLowerCase();
    return (row) =>
      columns.some((column) => {
        const value = column.of(row);
        if (typeof value !== "string") return false;
        return exact ? value === text : value.toLowerCase().includes(text);
      });
  });
  return (row) => tests.every((test) => test(row));
};

class Table {
  // columns: { key, of(row), title, width, show(value, row) }; `of` returns a number, a text or null.
  // total: the number of rows; a row is an index from 0. choose(row): called when the user selects it.
  constructor(box, { columns, total, choose, unit, name }) {
    Object.assign(this, { box, columns, total, unit, name, order: null });
    this.rowCount = box.querySelector(".row-count");
    const controls = box.querySelector(".controls");
    this.query = make("input", "", [], { type: "search", placeholder: `filter: words, or ${this.example()}` });
    this.query.setAttribute("aria-label", `filter ${unit}`);
    this.exact = make("input", "", [], { type: "checkbox" });
    controls.append(
      this.query,
      make("label", "check", [this.exact, "exact match"]),
      button("export CSV", () => this.export()),
    );
    this.query.addEventListener("input", () => this.apply());
    this.exact.addEventListener("change", () => this.apply());
    const list = box.querySelector(".list");
    list.classList.add("table");
    list.style.setProperty("--columns", columns.map((column) => column.width ?? "6rem").join(" "));
    list.style.setProperty("--width", `${6.5 * columns.length}rem`);
    this.list = new LongList(list, { row: (row) => this.row(row), choose, head: this.head() });
    this.apply();
  }

  // Returns an example of a column's values, for their type.
  sample(column) {
    for (let row = 0; row < Math.min(this.total, 100); row++) {
      if (column.of(row) !== null) return column.of(row);
    }
    return null;
  }

  example() {
    const number = this.columns.find((column) => typeof this.sample(column) === "number");
    const quoted = number && /\s/.test(number.key) ? `"${number.key}"` : number?.key;
    return number ? `${quoted}<${this.sample(number)}` : `${this.columns[0].key}=...`;
  }

  head() {
    this.heads = this.columns.map((column) => {
      const sort = button(column.title ?? column.key, () => this.sort(column), "sort");
      sort.title = `sort; its name in a filter: ${column.key}`;
      const number = this.total > 0 && typeof this.sample(column) === "number";
      const cell = make("div", number ? "cell number" : "cell", sort);
      cell.setAttribute("role", "columnheader");
      cell.setAttribute("aria-sort", "none");
      return cell;
    });
    const head = make("div", "heads", this.heads);
    head.setAttribute("role", "row");
    return head;
  }

  // The first click sorts ascending, the second descending, the third restores the order.
  sort(column) {
    const way = this.order?.column === column ? { 1: -1, "-1": 0 }[this.order.way] : 1;
    this.order = way ? { column, way } : null;
    this.columns.forEach((column, at) => {
      const direction = this.order?.column === column ? way : 0;
      this.heads[at].setAttribute("aria-sort", { 0: "none", 1: "ascending", "-1": "descending" }[direction]);
    });
    this.apply();
  }

  // Rows without a value come last in both directions.
  ordered(rows) {
    if (!this.order) return rows;
    const { column, way } = this.order;
    const value = new Map(rows.map((row) => [row, column.of(row)]));
    const texts = new Intl.Collator("en", { numeric: true });
    const compare = (a, b) => (typeof a === "string" ? texts.compare(a, b) : a - b);
    return rows.sort((one, other) => {
      const [a, b] = [value.get(one), value.get(other)];
      if (a === null || b === null) return (a === null) - (b === null) || one - other;
      return way * compare(a, b) || one - other;
    });
  }

  apply() {
    const matches = readFilter(this.query.value, this.columns, this.exact.checked);
    const rows = Array.from({ length: this.total }, (_, row) => row).filter(matches);
    const chosen = this.list.items[this.list.chosen];
    const ordered = this.ordered(rows);
    this.list.show(ordered, chosen === undefined ? -1 : ordered.indexOf(chosen));
    this.list.box.setAttribute("aria-rowcount", rows.length + 1);
    this.rowCount.textContent = `${count(rows.length)} of ${count(this.total)} ${this.unit}`;
  }

  ask(query) {
    this.query.value = query;
    this.exact.checked = false;
    this.apply();
  }

  // Marks a row that was selected elsewhere, if the filter lists it.
  mark(row) {
    this.list.mark(this.list.items.indexOf(row));
  }

  // Marks a row, and clears a filter that hides it.
  find(row) {
    if (!this.list.items.includes(row)) this.ask("");
    this.mark(row);
  }

  row(row) {
    return make("div", "", this.columns.map((column) => {
      const value = column.of(row);
      const content = value === null ? "" : (column.show?.(value, row) ?? (typeof value === "number" ? count(value) : value));
      const cell = make(typeof value === "number" ? "span" : "bdi", typeof value === "number" ? "number" : "cell", content);
      cell.setAttribute("role", "gridcell");
      return cell;
    }));
  }

  export() {
    const rows = this.list.items.map((row) => this.columns.map((column) => column.of(row)));
    save(`${this.name}-${this.unit}.csv`, asCSV(this.columns.map((column) => column.key), rows), "text/csv");
  }
}
