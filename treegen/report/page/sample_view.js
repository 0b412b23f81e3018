// One sample in full: its verdict and numbers, its text with the answer marked, and its problem.

// The CSS class of each status; index.statuses has the words.
const STATUS = ["wrong", "right", "invalid", "not-judged"];
const statusMark = (run, status) => make("span", `mark ${STATUS[status]}`, run.index.statuses[status] ?? "not judged");

const sampleName = (run, sample) => {
  const { samples, problems } = run.index;
  return `${problems.id[samples.problem[sample]]} #${samples.index[sample]}`;
};

const answerOf = (filter, sample) => {
  const answer = filter?.answer[sample] ?? -1;
  return answer < 0 ? null : filter.answers[answer];
};

// Returns the range of the answer in a text: after a word such as "answer", else its last occurrence.
// Answers are normalized, so the text may not contain the answer.
const answerSpan = (text, answer) => {
  if (!answer || answer.length > 200) return null;
  const from = Math.max(0, text.length - 200000);
  const escape = (text) => text.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");
  const body = /^-?\d+(\.\d+)?$/.test(answer)
    ? `${[...answer].map(escape).join(",?")}(?:\\.0+)?`
    : answer.trim().split(/\s+/).map(escape).join("\\s+"); // one pattern per run of blanks, or matching takes exponential time
  const pattern = new RegExp(`(?<![\\w.])${body}(?!\\w|[.,]\\d)`, "gi");
  let span = null;
  let isAnnounced = false;
  for (const match of text.slice(from).matchAll(pattern)) {
    const at = from + match.index;
    const announced = /(?:answer|####|boxed|=)[^\w\n]*(?:is|are)?[^\w\n]*$/i.test(text.slice(Math.max(0, at - 40), at));
    if (announced || !isAnnounced) span = [at, at + match[0].length];
    isAnnounced ||= announced;
  }
  return span;
};

// Returns the text of a sample, with its reasoning folded.
const sampleText = (run, sample, text, answer) => {
  const answerBlock = (text) => {
    const block = textBlock(text, 20000, false, answerSpan(text, answer));
    block.classList.add("said");
    return block;
  };
  const start = run.index.samples.answer_at?.[sample] ?? -1;
  if (start < 0) {
    const title = run.index.unit === "searches" ? "Best path" : "Sample";
    return [heading(run, 3, title), answerBlock(text)];
  }
  const tokens = `Thinking, ${count(run.index.samples.thinking[sample])} tokens`;
  const folded = make("details", "", [make("summary", "", tokens), textBlock(text.slice(0, start), 20000)]);
  const answerText = text.slice(start).replace(/^\n+/, "");
  return [folded, heading(run, 3, "Answer"), answerBlock(answerText)];
};

const sampleFacts = (run, filter, sample) => {
  const { samples, finishes, filters, problems } = run.index;
  const facts = [
    `${count(samples.tokens[sample])} tokens`,
    `logprob ${short(samples.logprob[sample])}`,
    `ended by ${finishes[samples.finish[sample]]}`,
  ];
  const prompt = problems.prompt_tokens[samples.problem[sample]];
  if (prompt > 0) facts.push(`prompt ${count(prompt)} tokens`);
  // The filter whose answer is marked comes first.
  const ordered = [filter, ...filters.filter((other) => other !== filter)].filter(Boolean);
  return [
    make("p", "facts", facts.map((fact) => make("span", "fact", fact))),
    ...ordered.map((entry) => {
      const outcome = entry.outcome[sample] >= 0 ? `, ${entry.outcomes[entry.outcome[sample]]}` : "";
      return make("div", "reading", [
        statusMark(run, Number(entry.status[sample])),
        `${entry.name}${outcome}: `,
        make("bdi", "", answerOf(entry, sample) ?? "no answer"),
      ]);
    }),
  ];
};

// Returns the images of a problem; their names are shown before they are decoded.
const problemImages = (run, problem) => {
  const images = run.index.problems.images?.[problem] ?? [];
  if (images.length === 0) return [];
  const figures = images.map(([label, place]) => {
    const figure = make("figure", "", make("figcaption", "", make("bdi", "", label)));
    if (place >= 0) run.images.get(place).then((src) => figure.prepend(make("img", "", [], { src, alt: label })));
    return figure;
  });
  return [make("div", "images", figures)];
};

const problemText = (run, question, reference, images = []) => [
  ...(question ? [heading(run, 3, "Question")] : []),
  ...images,
  ...(question ? [textBlock(question)] : []),
  ...(reference ? [heading(run, 3, "Reference"), textBlock(reference, 1000)] : []),
];

const VOTES = { 1: "tied", 2: "won", 3: "lost" };

// Returns the votes of a problem. ownAnswer: the answer of the sample that is shown.
const votesOf = (run, filter, problem, ownAnswer) => {
  const columns = run.index.samples;
  if (!filter || !run.index.votes) return [];
  const counts = new Map();
  for (let i = columns.first[problem]; i < columns.first[problem + 1]; i++) {
    const key = filter.answer[i];
    const vote = counts.get(key) ?? { number: 0, right: filter.status[i] === "1" };
    vote.number += 1;
    counts.set(key, vote);
  }
  const ranked = [...counts].sort((a, b) => (a[0] < 0) - (b[0] < 0) || b[1].number - a[1].number);
  const most = columns.first[problem + 1] - columns.first[problem];
  const rows = ranked.slice(0, 30).map(([answer, { number, right }]) => {
    const label = answer < 0 ? "no answer" : filter.answers[answer];
    const kind = answer < 0 ? "invalid" : right ? "right" : "wrong";
    return make("div", answer === ownAnswer ? "vote current" : "vote", [
      make("bdi", "answer", label),
      make("meter", kind, "", { min: 0, max: most, value: number, ariaLabel: `${kind}: ${number} of ${most}` }),
      make("span", "number", count(number)),
    ]);
  });
  if (ranked.length > 30) rows.push(make("p", "", `and ${count(ranked.length - 30)} more answers`));
  const title = { 1: ", a tie", 2: ", won by a right answer", 3: ", lost" }[filter.vote[problem]] ?? "";
  return [heading(run, 3, `Votes on this problem${title}`), ...rows];
};
