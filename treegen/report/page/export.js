// Exports of the shown data as files. Texts are as on the page, with control characters escaped.

const save = (name, content, type) => {
  const url = URL.createObjectURL(new Blob([content].flat(), { type: `${type};charset=utf-8` }));
  const link = make("a", "", "", { href: url, download: name.replace(/[^\w.-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
};

// Puts an apostrophe before a cell that a spreadsheet would evaluate as a formula.
const csvCell = (value) => {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
};

const asCSV = (head, rows) => `${[head, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n")}\r\n`;

// Returns why a node was not continued: the method pruned it, or a search function dropped it.
const nodeEnd = (node) => {
  if (!node.pruned) return node.dropped ? "dropped" : "";
  return node.pruned_because ? `pruned: ${node.pruned_because}` : "pruned";
};

// Exports search trees for other programs. `treegen show --tree ID --as dot` writes the same.
const nodeLines = (node) => {
  const characters = [...node.text.replace(/\s+/g, " ").trim()];
  // The problem is at the end of a prompt.
  const root = node.parent_id === null;
  const cut = () => (root ? `...${characters.slice(-80).join("")}` : `${characters.slice(0, 40).join("")}...`);
  const text = characters.length > (root ? 80 : 40) ? cut() : characters.join("");
  const facts = [
    ...(node.score === null ? [] : [`score ${node.score.toFixed(3)}`]),
    ...(node.visits ? [`visits ${node.visits}`] : []),
    ...(node.n_tokens ? [`${node.n_tokens} tokens`] : []),
    ...(nodeEnd(node) ? [nodeEnd(node)] : []),
  ];
  return [text || "(empty)", ...(facts.length ? [facts.join(", ")] : [])];
};

const legend = "bold: best path; dashed: pruned by the method or dropped by the function; score: value of a node, higher is better";

const asDot = (name, nodes, best) => {
  const quote = (text) => `"${text.replace(/[\\"]/g, "\\$&")}"`;
  const lines = [`digraph ${quote(name)} {`, "  rankdir=LR;", '  node [shape=box, style="rounded"];'];
  lines.push(`  label=${quote(legend)};`);
  for (const node of nodes) {
    const label = nodeLines(node).map((line) => quote(line).slice(1, -1)).join("\\n");
    const style = nodeEnd(node) ? ', style="rounded,dashed"' : "";
    const bold = best.has(node.id) ? ", penwidth=3" : "";
    lines.push(`  n${node.id} [label="${label}"${style}${bold}];`);
  }
  for (const node of nodes) {
    if (node.parent_id === null) continue;
    const bold = best.has(node.id) ? " [penwidth=3]" : "";
    lines.push(`  n${node.parent_id} -> n${node.id}${bold};`);
  }
  return `${lines.join("\n")}\n}\n`;
};

const asMermaid = (nodes, best) => {
  const quote = (text) => text.replace(/[^\w .,+*/=-]/g, (c) => (c.charCodeAt(0) < 128 ? `#${c.charCodeAt(0)};` : c));
  const lines = ["flowchart LR"];
  for (const node of nodes) lines.push(`  n${node.id}["${nodeLines(node).map(quote).join("<br>")}"]`);
  for (const node of nodes) {
    if (node.parent_id !== null) lines.push(`  n${node.parent_id} ${best.has(node.id) ? "==>" : "-->"} n${node.id}`);
  }
  for (const [name, style, marked] of [
    ["best", "stroke-width:4px", nodes.filter((node) => best.has(node.id))],
    ["pruned", "stroke-dasharray:4", nodes.filter((node) => node.pruned)],
    ["dropped", "stroke-dasharray:4", nodes.filter((node) => nodeEnd(node) === "dropped")],
  ]) {
    if (marked.length) lines.push(`  classDef ${name} ${style}`, `  class ${marked.map((node) => `n${node.id}`).join(",")} ${name}`);
  }
  return `${lines.join("\n")}\n  %% ${legend}\n`;
};
