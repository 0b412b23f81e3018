// The searches of a run: a table of them, and the tree of one, as a picture and as text.

const searchColumns = (run) => {
  const { trees } = run.index;
  const state = (solved) => (solved === null ? "open" : solved ? "solved" : "unsolved");
  const number = (key, title, of, digits = 0) => ({
    key, title, of: (i) => of(trees[i]) ?? null, width: "5.5rem", show: (value) => (digits ? value.toFixed(digits) : count(value)),
  });
  return [
    { key: "problem", of: (i) => trees[i].problem_id, width: "minmax(7rem, 11rem)" },
    ...(trees.some((tree) => tree.index) ? [number("search", "search", (tree) => tree.index)] : []),
    { key: "result", of: (i) => state(trees[i].solved), width: "5.5rem" },
    number("tokens", "decoded tokens", (tree) => tree.num_tokens),
    number("nodes", "nodes", (tree) => tree.num_nodes),
    number("calls", "calls", (tree) => tree.usage.calls),
    number("seconds", "seconds", (tree) => tree.usage.seconds, 2),
    { key: "answer", of: (i) => trees[i].answer, width: "minmax(7rem, 14rem)" },
    { key: "method", of: (i) => trees[i].method, width: "6rem" },
    { key: "ended", title: "ended by", of: (i) => trees[i].stopped || null, width: "minmax(8rem, 1fr)" },
  ];
};

// Returns the fields that the record has of a node.
const nodeFacts = (node) => [
  ...(node.score === null ? [] : [`score ${node.score.toFixed(3).replace("-", "\u2212")}`]),
  ...(node.visits ? [`${count(node.visits)} visits`] : []),
  ...(node.prior === undefined ? [] : [`prior ${short(node.prior)}`]),
  ...Object.entries(node.scores ?? {}).map(([name, value]) => `${name} ${typeof value === "number" ? short(value) : value}`),
  ...(node.logprob === null || !node.n_tokens ? [] : [`logprob ${short(node.logprob)}`]),
  ...(node.n_tokens ? [`${count(node.n_tokens)} tokens`] : []),
  ...(node.leaf && node.n_tokens && node.finish_reason ? [`ended by ${node.finish_reason}`] : []),
  ...(node.restart ? [`restart ${node.restart}`] : []),
  ...(node.step && node.step.reward !== null ? [`reward ${short(node.step.reward)}`] : []),
  ...(node.data === undefined ? [] : [`data ${node.data}`]),
];

// Returns the turns of one step of an agent: the reply with its calls, and the results of tools.
const stepTurns = (step) => [
  make("div", "turn assistant", [
    make("span", "role", "assistant"),
    ...(step.thoughts ? [textBlock(step.thoughts, 600)] : []),
    ...(step.text ? [textBlock(step.text, 1000)] : []),
    ...step.calls.map((call) => make("code", "call", call)),
  ]),
  ...step.results.map((result) => make("div", "turn tool", [make("span", "role", "tool"), textBlock(result, 1000)])),
];

// Returns the episode up to a node as a chat; its last step is next to the steps of its siblings.
const episode = (nodes, chosen, best) => {
  const above = (node) => (node.parent_id === null ? null : nodes[node.parent_id]);
  const before = (node) => {
    let at = above(node);
    while (at && !at.step) at = above(at);
    return at;
  };
  let last = chosen;
  while (last && !last.step) last = above(last);
  if (!last) return [];
  const path = [];
  for (let at = before(last); at; at = before(at)) path.unshift(at);
  const from = before(last);
  const siblings = nodes.filter((node) => node.step && before(node) === from);
  return [
    make("div", "chat", path.flatMap((node) => stepTurns(node.step))),
    make("div", "beside-siblings", siblings.map((node) => make("div", node === last ? "sibling chosen" : "sibling", [
      make("div", "head", [
        ...nodeMarks(node, best),
        ...nodeFacts(node).map((fact) => make("span", "fact", fact)),
        ...(node.step.end ? [make("span", "fact", node.step.end)] : []),
      ]),
      ...stepTurns(node.step),
    ]))),
  ];
};

const nodeMarks = (node, best) => [
  ...(best.has(node.id) ? [star("best")] : []),
  ...(nodeEnd(node) ? [make("span", "mark invalid", nodeEnd(node))] : []),
];

class Searches {
  // onShow(tree): called with the index of the tree that is shown.
  constructor(run, box, onShow) {
    Object.assign(this, { run, box, onShow });
    this.detail = box.querySelector(".detail");
    this.table = new Table(box, {
      columns: searchColumns(run), total: run.index.trees.length, unit: "search trees", name: run.name,
      choose: (i) => this.open(i),
    });
  }

  // Shows a search of a problem. index: its index among the searches of the problem.
  async go(problem, index = 0) {
    const { trees } = this.run.index;
    const current = trees.findIndex((tree) => tree.problem_id === problem && tree.index === index);
    const at = current < 0 ? trees.findIndex((tree) => tree.problem_id === problem) : current;
    if (at < 0) return;
    this.table.find(at);
    await this.open(at);
  }

  async open(i) {
    const { run } = this;
    const info = run.index.trees[i];
    const turn = (this.opening = (this.opening ?? 0) + 1);
    const place = run.index.problems.id.indexOf(info.problem_id);
    const [{ nodes, best: ids }, [question, reference]] = await Promise.all([
      run.trees.get(i), place < 0 ? ["", ""] : run.problems.get(place),
    ]);
    if (turn !== this.opening) return; // the user has opened another search in the meantime
    const best = new Set(ids);
    const name = `${run.name}-${info.problem_id}`;
    const picture = make("div", "picture", [], { id: `${run.key}-picture` });
    const node = make("div", "picked");
    const text = make("div", "tree");
    const list = this.list(text, nodes, best);
    this.detail.replaceChildren(
      heading(run, 2, make("bdi", "", info.index ? `${info.problem_id} #${info.index}` : info.problem_id)),
      ...problemText(run, question, reference, problemImages(run, place)),
      make("div", "controls", [
        button("unfold the best path", () => list.unfoldBest()),
        button("Graphviz", () => save(`${name}.dot`, asDot(info.problem_id, nodes, best), "text/vnd.graphviz")),
        button("Mermaid", () => save(`${name}.mmd`, asMermaid(nodes, best), "text/plain")),
      ]),
      picture, node, heading(run, 3, "As text"), text,
    );
    this.detail.hidden = false;
    const choose = (chosen) => node.replaceChildren(
      make("div", "head", [...nodeMarks(chosen, best), ...nodeFacts(chosen).map((fact) => make("span", "fact", fact))]),
      ...(chosen.step ? [] : [textBlock(chosen.text, chosen.parent_id === null ? 300 : 2000, chosen.parent_id === null)]),
      ...episode(nodes, chosen, best),
    );
    this.picture = new TreePicture(picture, { nodes, best, rootLabel: question, choose });
    choose(nodes[0]);
    await list.show(list.roots);
    await list.unfoldBest();
    this.onShow(i);
  }

  list(box, nodes, best) {
    const below = childrenById(nodes);
    const tree = new FoldingTree(box, {
      children: (node) => below.get(node.id) ?? [],
      describe: (node) => ({
        text: node.text,
        end: node.parent_id === null,
        limit: node.parent_id === null ? 200 : 400,
        best: best.has(node.id),
        folds: below.has(node.id),
        marks: nodeMarks(node, best),
        facts: nodeFacts(node),
      }),
    });
    tree.roots = below.get(null) ?? [];
    return tree;
  }
}
