// The problems of a run as a table.

const fixed = (digits) => (value) => value.toFixed(digits);

const problemColumns = (run) => {
  const { problems, filters, votes, unit } = run.index;
  const [filter] = filters;
  const columns = [{ key: "problem", of: (i) => problems.id[i], width: "minmax(7rem, 11rem)" }];
  if (problems.reference.some(Boolean)) {
    columns.push({ key: "reference", of: (i) => problems.reference[i] || null, width: "minmax(5rem, 9rem)" });
  }
  if (filter) {
    const title = unit === "searches" ? "solved" : "accuracy";
    columns.push({ key: title, of: (i) => filter.right[i], show: fixed(3) });
  }
  if (filter && votes) {
    columns.push(
      { key: "vote", of: (i) => VOTES[filter.vote[i]] ?? null, width: "4rem" },
      { key: "share", title: "top share", of: (i) => filter.share[i], show: fixed(3) },
      { key: "answer", title: "top answer", of: (i) => (filter.best[i] < 0 ? null : answerOf(filter, filter.best[i])), width: "minmax(5rem, 9rem)" },
    );
  }
  columns.push(
    { key: "samples", title: unit, of: (i) => run.index.samples.first[i + 1] - run.index.samples.first[i], width: "5rem" },
    { key: "tokens", title: "mean tokens", of: (i) => problems.tokens[i], show: fixed(1), width: "7rem" },
    { key: "prompt", title: "prompt tokens", of: (i) => problems.prompt_tokens[i] || null, width: "7.5rem" },
  );
  if (problems.group.some(Boolean)) columns.push({ key: "group", of: (i) => problems.group[i] || null });
  if (problems.question.some(Boolean)) {
    columns.push({ key: "question", of: (i) => problems.question[i], width: "minmax(26rem, 1fr)" });
  }
  return columns;
};
