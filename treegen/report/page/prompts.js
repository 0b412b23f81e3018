// The tree of prompts, with the samples of each problem below its prompt.

const promptTree = (run, box) => {
  const { index } = run;
  const { samples, problems } = index;
  const filter = index.filters[0];
  const tree = new FoldingTree(box, {
    children: async (node) => {
      if (node.sample !== undefined) return [];
      if (node.problem === undefined) return node.below.map((i) => index.prompts[i]);
      const texts = [];
      for (let i = samples.first[node.problem]; i < samples.first[node.problem + 1]; i++) {
        texts.push({ sample: i, text: await run.texts.get(i) });
      }
      return [...texts, ...(node.below ?? []).map((i) => index.prompts[i])];
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
          marks: [...(best ? [star("top answer")] : []), statusMark(run, status)],
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
        limit: node.problem === undefined ? 400 : 160,
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
