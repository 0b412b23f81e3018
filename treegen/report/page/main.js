// Puts the parts of each run together.

const promptTree = (run, box) => {
  const { index } = run;
  const { samples, problems } = index;
  const filter = index.filters[0];
  const tree = new FoldingTree(box, {
    children: async (node) => {
      if (node.sample !== undefined) return [];
      if (node.problem === undefined) return node.below.map((i) => index.prompts[i]);
      const found = [];
      for (let i = samples.first[node.problem]; i < samples.first[node.problem + 1]; i++) {
        found.push({ sample: i, text: await run.texts.get(i) });
      }
      return [...found, ...(node.below ?? []).map((i) => index.prompts[i])];
    },
    describe: (node) => {
      if (node.sample !== undefined) {
        const i = node.sample;
        const status = filter ? Number(filter.status[i]) : 3;
        const answer = filter && filter.answer[i] >= 0 ? [`answer ${filter.answers[filter.answer[i]]}`] : [];
        const best = index.votes && filter?.best[samples.problem[i]] === i;
        return {
          text: node.text,
          best,
          folds: false,
          marks: [...(best ? [star("elected")] : []), fateMark(run, status)],
          facts: [
            `sample ${samples.index[i]}`, ...answer, `logprob ${short(samples.logprob[i])}`,
            `${count(samples.tokens[i])} tokens`,
          ],
        };
      }
      const name = node.problem === undefined ? [] : [problems.id[node.problem]];
      const accuracy = node.score === null ? [] : [`accuracy ${node.score.toFixed(3)}`];
      const logprob = node.logprob === null ? [] : [`mean logprob ${short(node.logprob)}`];
      return {
        text: node.text,
        shown: node.problem === undefined ? 400 : 160,
        folds: true,
        best: false,
        marks: [],
        facts: [
          ...name, ...accuracy, ...logprob, `${count(node.samples)} samples`,
          `${count(node.tokens)} tokens generated`,
        ],
      };
    },
  });
  return tree.show([index.prompts[0]]);
};

const searchTrees = (run, box) => {
  const { trees } = run.index;
  const detail = box.querySelector(".detail");
  const list = new LongList(box.querySelector(".list"), {
    row: (i) => {
      const tree = trees[i];
      const status = tree.solved === null ? "not judged" : tree.solved ? "right" : "wrong";
      return make("div", "", [
        make("span", `mark ${status.replace(" ", "-")}`, tree.solved === null ? "open" : tree.solved ? "solved" : "unsolved"),
        make("bdi", "name", tree.problem_id),
        make("bdi", "answer", tree.answer ?? ""),
        make("span", "number", `${count(tree.num_tokens)} tok`),
        make("span", "snippet", `${tree.method}, ${count(tree.num_nodes)} nodes`),
      ]);
    },
    choose: async (i) => {
      const { nodes, best } = await run.trees.get(i);
      const below = new Map();
      for (const node of nodes) {
        if (!below.has(node.parent_id)) below.set(node.parent_id, []);
        below.get(node.parent_id).push(node);
      }
      const onPath = new Set(best);
      const drawn = make("div", "tree");
      const unfold = button("unfold the best path", () => tree.unfoldBest());
      detail.replaceChildren(make("h4", "", make("bdi", "", trees[i].problem_id)), unfold, drawn);
      detail.hidden = false;
      const tree = new FoldingTree(drawn, {
        children: (node) => below.get(node.id) ?? [],
        describe: (node) => ({
          text: node.text,
          end: node.parent_id === null,
          shown: node.parent_id === null ? 200 : 400,
          best: onPath.has(node.id),
          folds: below.has(node.id),
          marks: [
            ...(onPath.has(node.id) ? [star("best")] : []),
            ...(node.pruned ? [make("span", "mark invalid", "pruned")] : []),
          ],
          facts: [
            ...(node.score === null ? [] : [`score ${short(node.score)}`]),
            ...(node.logprob === null || !node.n_tokens ? [] : [`logprob ${short(node.logprob)}`]),
            ...(node.n_tokens ? [`${count(node.n_tokens)} tokens`] : []),
            ...(node.leaf && node.n_tokens && node.finish_reason ? [`ended by ${node.finish_reason}`] : []),
          ],
        }),
      });
      await tree.show(below.get(null) ?? []);
      await tree.unfoldBest();
    },
  });
  list.show(trees.map((_, i) => i));
  list.pick(0);
};

const begin = async (article) => {
  const name = article.id;
  const index = await decode(`${name}-index`);
  const run = {
    index,
    texts: new Parts(`${name}-texts`, index.text_starts, index.samples.problem.length),
    problems: new Parts(`${name}-problems`, index.problem_starts, index.problems.id.length),
    trees: new Parts(`${name}-trees`, index.tree_starts, index.trees.length),
  };
  const [samples, prompts, trees] = ["samples", "prompts", "searches"].map((c) => article.querySelector(`.${c}`));
  if (samples) new Samples(run, samples);
  if (trees) searchTrees(run, trees);
  if (prompts) await promptTree(run, prompts.querySelector(".tree"));
  article.dataset.ready = "";
};

for (const article of document.querySelectorAll("article")) begin(article);
