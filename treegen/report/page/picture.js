// A drawing of a search tree: the root is at the left, with one column for each depth. The user can
// drag, zoom and fold it, and move between nodes by keys.

const SVG = "http://www.w3.org/2000/svg";
const svgElement = (tag, attributes, ...inside) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
};

// The colour map cividis: lighter is more, also in grey and for all kinds of colour vision.
const CIVIDIS = [[0, 34, 78], [52, 69, 110], [102, 105, 112], [148, 142, 119], [203, 186, 105], [253, 234, 69]];
const cividis = (share) => {
  const place = Math.max(0, Math.min(1, share)) * (CIVIDIS.length - 1);
  const at = Math.min(CIVIDIS.length - 2, Math.floor(place));
  const mixed = CIVIDIS[at].map((low, c) => Math.round(low + (place - at) * (CIVIDIS[at + 1][c] - low)));
  return `rgb(${mixed.join(",")})`;
};

class TreePicture {
  static columns = 240;
  static rows = 40;
  static apart = 54; // extra space above a node whose label is above it
  static most = 60; // maximum number of nodes that are unfolded at first

  // best: the ids of the nodes of the best path. rootLabel: a short label in place of the prompt.
  // choose(node): called when the user selects a node.
  constructor(box, { nodes, best, rootLabel, choose }) {
    Object.assign(this, { box, nodes, best, rootLabel, choose, scale: 1, x: 0, y: 0 });
    this.byId = new Map(nodes.map((node) => [node.id, node]));
    this.below = childrenById(nodes);
    this.root = nodes[0];
    this.picked = this.root;
    const scores = nodes.map((node) => node.score).filter((score) => score !== null);
    this.range = [Math.min(...scores), Math.max(...scores)];
    // Values from 0 to 1 keep the same colours in every tree.
    if (this.range[0] >= 0 && this.range[1] <= 1) this.range = [0, 1];
    this.visits = Math.max(1, ...nodes.map((node) => node.visits ?? 0));
    this.fold();
    this.layer = svgElement("g", {});
    this.svg = svgElement("svg", { role: "tree", tabindex: 0, "aria-label": "Search tree" }, this.layer);
    const buttons = [
      button("+", () => this.zoom(1.4)), button("\u2212", () => this.zoom(1 / 1.4)),
      button("fit", () => this.fit()), button("fold", () => this.toggle(this.picked)),
      button("unfold all", () => this.unfoldAll()),
    ];
    ["zoom in", "zoom out"].forEach((label, at) => buttons[at].setAttribute("aria-label", label));
    this.controls = make("div", "controls", buttons);
    box.append(this.controls, this.svg, this.legend());
    this.svg.addEventListener("keydown", (event) => this.onkey(event));
    this.svg.addEventListener("wheel", (event) => this.onwheel(event), { passive: false });
    this.svg.addEventListener("pointerdown", (event) => this.drag(event));
    this.draw();
    requestAnimationFrame(() => this.fit());
  }

  legend() {
    const [least, most] = this.range;
    const scored = Number.isFinite(least);
    const parts = [
      ...(scored ? [`score ${short(least)} `, ...[0, 0.25, 0.5, 0.75, 1].map((share) => {
        const swatch = make("span", "swatch");
        swatch.style.background = cividis(share);
        return swatch;
      }), ` ${short(most)}; `] : []),
      ...(this.visits > 1 ? ["larger: more visits; "] : []),
      "dashed and grey: pruned or dropped; thick: the best path; double click or Enter: fold; drag, Ctrl and wheel, + and \u2212: move",
    ];
    return make("p", "faint legend", parts);
  }

  // Folds the deepest nodes until few enough are left, but never the best path.
  fold() {
    this.folded = new Set();
    let level = [this.root];
    let total = 1;
    while (level.length) {
      const next = [];
      for (const node of level) {
        const below = this.below.get(node.id) ?? [];
        if (total + below.length > TreePicture.most && !this.best.has(node.id) && below.length) {
          this.folded.add(node.id);
        } else {
          next.push(...below);
          total += below.length;
        }
      }
      level = next;
    }
  }

  shownBelow(node) {
    return this.folded.has(node.id) ? [] : (this.below.get(node.id) ?? []);
  }

  // Positions all visible nodes: leaves below each other, inner nodes centred on their children.
  layout() {
    this.at = new Map();
    const order = [];
    const stack = [[this.root, 0]];
    while (stack.length) {
      const [node, depth] = stack.pop();
      order.push([node, depth]);
      stack.push(...this.shownBelow(node).map((child) => [child, depth + 1]).reverse());
    }
    let low = null;
    for (const [node, depth] of order) {
      if (this.shownBelow(node).length > 0) continue;
      const first = node === this.root || this.below.get(node.parent_id)[0] === node;
      low = low === null ? 0 : low + (first ? TreePicture.apart : TreePicture.rows);
      this.at.set(node.id, [depth * TreePicture.columns, low]);
    }
    for (const [node, depth] of order.reverse()) {
      const below = this.shownBelow(node);
      if (below.length === 0) continue;
      const ys = below.map((child) => this.at.get(child.id)[1]);
      this.at.set(node.id, [depth * TreePicture.columns, (ys[0] + ys.at(-1)) / 2]);
    }
    this.order = order.reverse().map(([node]) => node);
    // The initial height is that of the tree, within limits.
    if (this.svg) this.svg.style.height = `${Math.max(130, Math.min(420, low + 2 * TreePicture.rows))}px`;
  }

  draw() {
    this.layout();
    const edges = [];
    const nodes = [];
    for (const node of this.order) {
      const [x, y] = this.at.get(node.id);
      if (node.parent_id !== null && this.at.has(node.parent_id)) {
        const [left, up] = this.at.get(node.parent_id);
        const bend = left + 150; // the edge is straight below the label
        const classes = ["edge", ...this.kinds(node)].join(" ");
        edges.push(svgElement("path", { class: classes, d: `M${left} ${up}H${bend}C${bend + 60} ${up} ${x - 50} ${y} ${x} ${y}` }));
      }
      nodes.push(this.node(node, x, y));
    }
    this.layer.replaceChildren(...edges, ...nodes);
    this.move();
  }

  node(node, x, y) {
    const text = node === this.root && this.rootLabel ? this.rootLabel : node.text;
    const words = text.replace(/\s+/g, " ").trim();
    const facts = [
      ...(node.score === null ? [] : [short(node.score)]),
      ...(node.visits ? [`${count(node.visits)}\u00d7`] : []),
    ].join(" \u00b7 ");
    const hidden = this.folded.has(node.id) ? this.size(node) : 0;
    const [least, most] = this.range;
    const share = most > least ? (node.score - least) / (most - least) : 1;
    const radius = node.visits ? 5 + 6 * Math.sqrt(node.visits / this.visits) : 6;
    const kinds = this.kinds(node);
    // A score has the darkest colours of both themes, so an ended node is a ring around its score.
    const dots = [svgElement("circle", { class: ["dot", ...kinds].join(" "), r: radius + (nodeEnd(node) ? 1 : 0) })];
    if (nodeEnd(node) && node.score !== null) dots.push(svgElement("circle", { class: "core", r: radius - 3 }));
    if (node.score !== null) dots.at(-1).style.fill = cividis(share);
    const cut = [...words];
    // A node with edges to its right has its label above them.
    const inner = this.shownBelow(node).length > 0;
    const [left, up, down] = inner ? [-radius, -radius - 4, radius + 11] : [radius + 5, facts || hidden ? -2 : 4, 12];
    const label = svgElement("text", { x: left, y: up }, cut.length > 22 ? `${cut.slice(0, 21).join("")}\u2026` : words);
    const more = svgElement("text", { x: left, y: down, class: "facts" }, [facts, ...(hidden ? [`+${count(hidden)}`] : [])].filter(Boolean).join("  "));
    const group = svgElement("g", {
      class: ["tree-node", ...kinds, ...(node === this.picked ? ["picked"] : [])].join(" "), transform: `translate(${x} ${y})`, role: "treeitem",
      "aria-label": `${words.slice(0, 80)} ${facts}`, id: `${this.box.id}-node-${node.id}`,
    }, ...dots, label, more);
    if (this.below.has(node.id)) group.setAttribute("aria-expanded", String(!this.folded.has(node.id)));
    group.dataset.id = node.id;
    return group;
  }

  // Returns the CSS classes of a node and its edge: pruned, dropped, or on the best path.
  kinds(node) {
    return [...(nodeEnd(node) ? [nodeEnd(node).split(":")[0]] : []), ...(this.best.has(node.id) ? ["best"] : [])];
  }

  // Returns the number of nodes below a node.
  size(node) {
    let total = 0;
    const stack = [node];
    while (stack.length) {
      const below = this.below.get(stack.pop().id) ?? [];
      total += below.length;
      stack.push(...below);
    }
    return total;
  }

  move() {
    this.layer.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.scale})`);
  }

  fit() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const places = [...this.at.values()];
    const right = Math.max(...places.map(([x]) => x)) + TreePicture.columns - 20;
    const bottom = Math.max(...places.map(([, y]) => y)) + TreePicture.rows;
    // If the whole tree would be too small to read, show the end of the best path instead.
    this.scale = Math.max(0.65, Math.min(1.2, width / (right + 40), height / (bottom + 20)));
    this.x = 20;
    const end = this.order.findLast((node) => this.best.has(node.id)) ?? this.root;
    const centred = height / 2 - this.at.get(end.id)[1] * this.scale;
    this.y = Math.min(24, Math.max(Math.min(24, height - bottom * this.scale), centred));
    this.move();
  }

  zoom(factor, x = this.svg.clientWidth / 2, y = this.svg.clientHeight / 2) {
    const scale = Math.max(0.05, Math.min(4, this.scale * factor));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.move();
  }

  onwheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const box = this.svg.getBoundingClientRect();
    this.zoom(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
  }

  drag(event) {
    const [startX, startY, x, y] = [event.clientX, event.clientY, this.x, this.y];
    const target = event.target.closest(".tree-node");
    let moved = false;
    const onmove = (now) => {
      moved ||= Math.hypot(now.clientX - startX, now.clientY - startY) > 4;
      if (!moved) return;
      [this.x, this.y] = [x + now.clientX - startX, y + now.clientY - startY];
      this.move();
    };
    const onup = () => {
      window.removeEventListener("pointermove", onmove);
      window.removeEventListener("pointerup", onup);
      window.removeEventListener("pointercancel", onup);
      if (moved || !target) return;
      const node = this.byId.get(Number(target.dataset.id));
      const twice = this.picked === node && performance.now() - (this.clicked ?? 0) < 400;
      this.clicked = performance.now();
      if (twice) this.toggle(node);
      else this.pick(node);
    };
    window.addEventListener("pointermove", onmove);
    window.addEventListener("pointerup", onup);
    window.addEventListener("pointercancel", onup);
  }

  pick(node) {
    this.picked = node;
    this.draw();
    this.svg.setAttribute("aria-activedescendant", `${this.box.id}-node-${node.id}`);
    // Scroll to the node if it is not visible.
    const [x, y] = this.at.get(node.id).map((place) => place * this.scale);
    const [right, down] = [this.svg.clientWidth, this.svg.clientHeight];
    if (x + this.x < 10 || x + this.x > right - 60) this.x = right / 3 - x;
    if (y + this.y < 10 || y + this.y > down - 20) this.y = down / 2 - y;
    this.move();
    this.choose(node);
  }

  toggle(node) {
    if (!this.below.has(node.id)) return;
    if (!this.folded.delete(node.id)) this.folded.add(node.id);
    this.draw();
  }

  unfoldAll() {
    this.folded.clear();
    this.draw();
    this.fit();
  }

  onkey(event) {
    const node = this.picked;
    const siblings = this.order.filter((other) => this.at.get(other.id)[0] === this.at.get(node.id)[0]);
    const next = {
      ArrowLeft: () => this.byId.get(node.parent_id),
      ArrowRight: () => this.shownBelow(node)[0],
      ArrowUp: () => siblings[siblings.indexOf(node) - 1],
      ArrowDown: () => siblings[siblings.indexOf(node) + 1],
    }[event.key];
    const act = {
      Enter: () => this.toggle(node), " ": () => this.toggle(node), 0: () => this.fit(),
      "+": () => this.zoom(1.4), "=": () => this.zoom(1.4), "-": () => this.zoom(1 / 1.4),
    }[event.key];
    if ((!next && !act) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    if (act) act();
    else if (next()) this.pick(next());
  }
}
