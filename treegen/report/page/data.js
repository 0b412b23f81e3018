// What the page embeds: JSON, gzipped and in base64, one part for each script element. Parts are
// decoded when they are first needed, so that a page of many megabytes opens at once.

const decode = async (id) => {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

// Items in parts: part k of `name` holds items starts[k] to starts[k + 1].
class Parts {
  static kept = 32e6; // characters decoded at a time at most, about

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

  // The items of a part: at once if they are decoded, else undefined.
  peek(part) {
    return this.parts.get(part)?.items;
  }

  async part(part) {
    let found = this.parts.get(part);
    if (!found) {
      found = { loading: decode(`${this.name}-${part}`) };
      this.parts.set(part, found);
      found.items = await found.loading;
      found.size = found.items.reduce((sum, item) => sum + (item.length ?? 200), 0);
      this.size += found.size;
      this.forget(part);
    }
    return found.items ?? found.loading;
  }

  forget(except) {
    for (const [part, { items, size }] of this.parts) {
      if (this.size <= Parts.kept) return;
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
