// Builds elements of the page. Texts of models and data are only assigned to textContent.

const make = (tag, className = "", content = "", more = {}) => {
  const element = Object.assign(document.createElement(tag), { className, ...more });
  element.append(...(Array.isArray(content) ? content : [content]));
  return element;
};

// Formats integers without Intl, which takes milliseconds to set up.
const count = (number) =>
  Number.isInteger(number) ? String(number).replace(/\B(?=(\d{3})+$)/g, ",") : number.toLocaleString("en-US");
const short = (number) => (number === null ? "n/a" : number.toFixed(2).replace("-", "\u2212"));
const button = (label, onclick, className = "") =>
  make("button", className, label, { type: "button", onclick });

// Returns a heading. Its level follows from the level of the run, so that no level is skipped.
const heading = (run, below, content) => make(`h${run.level + below}`, "", content);

// Returns a long text cut, with a button for more, because a line of a megabyte would block the
// browser. end: show the end of the text first, where a prompt has the question. span: the range of
// characters to mark, if any.
const textBlock = (text, limit = 4000, end = false, span = null) => {
  const body = make("div", "text");
  const block = make("div", "block", body);
  const show = (length, end) => {
    if (span && span[1] <= length && !end) {
      const [start, stop] = span;
      const marked = make("mark", "", text.slice(start, stop));
      body.replaceChildren(text.slice(0, start), marked, text.slice(stop, length));
    } else {
      body.textContent = end && text.length > length ? `\u2026${text.slice(-length)}` : text.slice(0, length);
    }
    block.querySelector(".more")?.remove();
    if (text.length > length) {
      const next = Math.min(text.length, length + Math.min(Math.max(length, 20000), 200000));
      const what = next < text.length ? `${count(next)} of` : "all";
      block.append(button(`show ${what} ${count(text.length)} characters`, () => show(next), "more"));
    }
  };
  show(limit, end);
  if (text === "") block.classList.add("empty");
  return block;
};

// A virtual list: only the visible rows exist, so 50,000 rows are as fast as 50.
class LongList {
  // row(item): returns the element of a row. choose(item): called when the user selects a row. head:
  // an element that stays above the rows, for tables.
  constructor(box, { row, choose, head = null }) {
    Object.assign(this, { box, row, choose, head, items: [], chosen: -1 });
    this.inner = make("div", "rows");
    box.append(...(head ? [head] : []), this.inner);
    box.tabIndex = 0;
    box.setAttribute("role", head ? "grid" : "listbox");
    this.inner.setAttribute("role", head ? "rowgroup" : "presentation");
    box.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    box.addEventListener("keydown", (event) => this.onkey(event));
    box.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.pick(Number(row.dataset.at));
    });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  // chosen: the index of the item to mark, if any.
  show(items, chosen = -1) {
    this.items = items;
    this.chosen = -1;
    this.box.scrollTop = 0;
    this.draw();
    if (chosen >= 0) this.mark(chosen);
  }

  // Draws the visible rows; also needed after items were appended.
  draw() {
    const height = parseFloat(getComputedStyle(this.box).getPropertyValue("--row")) || 40;
    this.height = height;
    this.above = this.head?.offsetHeight ?? 0;
    this.inner.style.height = `${this.items.length * height}px`;
    // A horizontal scroll bar takes some of the height.
    const bar = this.box.scrollWidth > this.box.clientWidth ? 20 : 0;
    this.box.style.maxHeight = `${this.above + Math.max(1, this.items.length) * height + 2 + bar}px`;
    const first = Math.max(0, Math.floor(this.box.scrollTop / height) - 5);
    const last = Math.min(this.items.length, first + Math.ceil(this.box.clientHeight / height) + 10);
    this.inner.replaceChildren();
    for (let at = first; at < last; at++) {
      const row = this.row(this.items[at]);
      row.classList.add("row");
      row.dataset.at = at;
      row.id = `${this.box.id}-${at}`;
      row.setAttribute("role", this.head ? "row" : "option");
      row.setAttribute("aria-selected", String(at === this.chosen));
      row.style.top = `${at * height}px`;
      this.inner.append(row);
    }
  }

  // Marks a row and scrolls to it, without calling choose.
  mark(at) {
    this.chosen = at;
    if (at >= 0) {
      const top = at * this.height;
      if (top < this.box.scrollTop) this.box.scrollTop = top;
      const bottom = top + this.height + this.above - this.box.clientHeight;
      if (bottom > this.box.scrollTop) this.box.scrollTop = bottom;
      this.box.setAttribute("aria-activedescendant", `${this.box.id}-${at}`);
    }
    this.draw();
  }

  pick(at) {
    if (at < 0 || at >= this.items.length) return;
    this.mark(at);
    return this.choose(this.items[at]);
  }

  // Selects the row that is some steps after the marked one.
  move(step) {
    return this.pick(Math.max(0, Math.min(this.items.length - 1, this.chosen + step)));
  }

  onkey(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.height) - 1);
    const all = this.items.length;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -all, End: all }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.move(step);
  }
}
