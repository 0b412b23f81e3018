// A foldable tree. Nodes are created on demand: children when their parent unfolds, and many
// children in batches.

// Returns the children of each node that has some, by its id; the roots are the children of null.
const childrenById = (nodes) => {
  const below = new Map();
  for (const node of nodes) {
    if (!below.has(node.parent_id)) below.set(node.parent_id, []);
    below.get(node.parent_id).push(node);
  }
  return below;
};

class FoldingTree {
  static batch = 20;

  // children(node): returns an array, or a promise of one. describe(node): returns what to show.
  constructor(box, { children, describe }) {
    Object.assign(this, { box, children, describe });
    box.setAttribute("role", "tree");
  }

  async show(roots, { unfold = 1 } = {}) {
    this.box.replaceChildren();
    this.add(this.box, roots);
    for (const item of [...this.box.children].slice(0, unfold)) await this.unfold(item);
  }

  add(parent, nodes) {
    for (const node of nodes.slice(0, FoldingTree.batch)) parent.append(this.item(node));
    const remaining = nodes.slice(FoldingTree.batch);
    if (remaining.length === 0) return;
    const more = button(`${count(remaining.length)} more`, () => {
      more.remove();
      this.add(parent, remaining);
    }, "more");
    parent.append(more);
  }

  item(node) {
    const { text, facts, marks, best, folds, limit = 400, end } = this.describe(node);
    const item = make("div", best ? "node best" : "node");
    item.setAttribute("role", "treeitem");
    const head = make("div", "head");
    if (folds) {
      const fold = button("\u25b8", () => this.toggle(item), "fold");
      fold.setAttribute("aria-label", "unfold");
      item.setAttribute("aria-expanded", "false");
      head.append(fold);
    }
    head.append(...marks, ...facts.map((fact) => make("span", "fact", fact)));
    item.append(head, textBlock(text, limit, end));
    item.node = node;
    return item;
  }

  toggle(item) {
    return item.getAttribute("aria-expanded") === "true" ? this.fold(item) : this.unfold(item);
  }

  fold(item) {
    item.querySelector(":scope > .below").remove();
    this.mark(item, false);
  }

  async unfold(item) {
    if (item.getAttribute("aria-expanded") !== "false") return;
    this.mark(item, true);
    const below = make("div", "below");
    below.setAttribute("role", "group");
    item.append(below);
    this.add(below, await this.children(item.node));
  }

  // Unfolds the best path down to its end.
  async unfoldBest() {
    let item = this.box.querySelector(":scope > .best");
    while (item) {
      await this.unfold(item);
      item = item.querySelector(":scope > .below > .best");
    }
  }

  mark(item, open) {
    item.setAttribute("aria-expanded", String(open));
    const fold = item.querySelector(":scope > .head > .fold");
    fold.textContent = open ? "\u25be" : "\u25b8";
    fold.setAttribute("aria-label", open ? "fold" : "unfold");
  }
}

const star = (label) => make("span", "mark star", `\u2605 ${label}`);
