// The embedded data: JSON, gzipped and in base64, with one part in each script element. A part is
// decoded on first use. The parts follow this script, so a page of many megabytes shows its first
// rows while the browser still loads the rest.

// Returns the element of a part when the browser has loaded all of it.
const embedded = async (id) => {
  for (;;) {
    const script = document.getElementById(id);
    // If another element follows, the browser has loaded all of this one.
    if (script?.nextSibling || document.readyState !== "loading") return script;
    await new Promise((resume) => {
      const watch = new MutationObserver(() => (watch.disconnect(), resume()));
      watch.observe(document.body, { childList: true });
      document.addEventListener("DOMContentLoaded", resume, { once: true });
    });
  }
};

// Returns the JSON text of a part.
const unpack = async (id) => {
  const raw = atob((await embedded(id)).textContent);
  const packed = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};

// Adds the columns of samples that follow from the position of each problem's first sample.
const countSamples = (samples) => {
  const { first } = samples;
  const total = first[first.length - 1];
  const [problem, index] = [new Uint32Array(total), new Uint32Array(total)];
  for (let i = 0; i + 1 < first.length; i++) {
    for (let at = first[i]; at < first[i + 1]; at++) {
      problem[at] = i;
      index[at] = at - first[i];
    }
  }
  samples.problem = problem;
  samples.index ??= index;
};

// A list of items in parts: part k of `name` has the items from starts[k] to before starts[k + 1].
class Parts {
  static maxCached = 32e6; // maximum of characters of JSON in memory

  constructor(name, starts, total) {
    Object.assign(this, { name, starts, total, parts: new Map(), size: 0 });
  }

  partOf(item) {
    let low = 0;
    let high = this.starts.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= item) low = middle;
      else high = middle;
    }
    return low;
  }

  // Returns the items of a part if they are decoded, else undefined.
  peek(part) {
    return this.parts.get(part)?.items;
  }

  async part(part) {
    let entry = this.parts.get(part);
    if (!entry) {
      const text = unpack(`${this.name}-${part}`);
      entry = { loading: text.then(JSON.parse) };
      this.parts.set(part, entry);
      entry.size = (await text).length;
      entry.items = await entry.loading;
      this.size += entry.size;
      this.forget(part);
    }
    return entry.items ?? entry.loading;
  }

  forget(except) {
    for (const [part, { items, size }] of this.parts) {
      if (this.size <= Parts.maxCached) return;
      if (items && part !== except) {
        this.parts.delete(part);
        this.size -= size;
      }
    }
  }

  async get(item) {
    const part = this.partOf(item);
    return (await this.part(part))[item - this.starts[part]];
  }
}
