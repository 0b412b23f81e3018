// Links over the bars and points of a plot. There is one link element, which moves to the bar or
// point below the pointer, or to the next one by the arrow keys.

class PlotLinks {
  // Adds the links to the figures of plots. links: the links by the name of the plot.
  static add(figures, links, options) {
    for (const figure of figures) {
      const own = links[figure.dataset.plot];
      if (own) new PlotLinks(figure, own, options);
    }
  }

  // links: lists of left, top, right, bottom and place, the first four as shares of the picture.
  // state(place): the state of the page to which it links. label(place): its accessible name.
  constructor(figure, links, { state, label }) {
    Object.assign(this, { figure, links, state, label, at: -1 });
    this.image = figure.querySelector("img");
    this.link = make("a", "plot-link", "", { href: "#" });
    this.place(0);
    figure.append(this.link);
    figure.addEventListener("pointermove", (event) => {
      const at = this.find(event);
      if (at >= 0) this.place(at);
    });
    // Touch screens have no hover, so a tap on the picture follows the link.
    this.image.addEventListener("click", (event) => {
      const at = this.find(event);
      if (at >= 0) location.hash = addressOf(state(links[at][4]));
    });
    this.link.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.place((this.at + step + links.length) % links.length);
    });
    this.link.addEventListener("focus", () => this.place(this.at));
  }

  // Returns the index of the link below the pointer, or -1.
  find(event) {
    const box = this.image.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    // If links overlap, take the smallest.
    let smallest = -1;
    let least = Infinity;
    this.links.forEach(([left, top, right, bottom], at) => {
      if (x < left || x > right || y < top || y > bottom) return;
      const area = (right - left) * (bottom - top);
      if (area < least) [smallest, least] = [at, area];
    });
    return smallest;
  }

  place(at) {
    this.at = at;
    const [left, top, right, bottom, place] = this.links[at];
    const { offsetLeft, offsetTop, clientWidth, clientHeight } = this.image;
    Object.assign(this.link.style, {
      left: `${offsetLeft + left * clientWidth}px`,
      top: `${offsetTop + top * clientHeight}px`,
      width: `${(right - left) * clientWidth}px`,
      height: `${(bottom - top) * clientHeight}px`,
    });
    this.link.href = addressOf(this.state(place));
    this.link.title = this.label(place);
    this.link.setAttribute("aria-label", this.label(place));
  }
}
