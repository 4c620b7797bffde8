// A time series of the last 15 minutes, with values under the pointer.

import { element, shape } from "../shared/dom.js";

export const SPAN = 900; // seconds that are shown
const GAP = 2.5; // intervals without a value after which a line is interrupted
const HEIGHT = 100; // of the drawing, in its own units

const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();

// The smallest of 1, 2, 2.5 and 5 times a power of ten that is at least a value.
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= value * 0.999);
}

export class Chart {
  // lines: [{name, of(sample), isDashed}]; format(value): with its unit; empty: words without data;
  // hasZeros: values of 0 are data.
  constructor({ title, help, lines, format, top = 0, hasZeros = false, empty }) {
    Object.assign(this, { lines, format, top, hasZeros, samples: [], marks: [], place: null });
    this.values = element("p", { className: "values" });
    this.svg = shape("svg", { viewBox: `0 0 ${SPAN} ${HEIGHT}`, preserveAspectRatio: "none",
      "aria-hidden": "true" });
    this.tip = element("div", { className: "tip", hidden: true });
    this.empty = element("p", { className: "empty quiet", text: empty });
    this.most = element("span", { className: "most" });
    this.plot = element("div", { className: "plot", tabIndex: 0, role: "img", "aria-label": title },
      this.svg, this.most, this.empty, this.tip);
    const legend = lines.length > 1 ? lines.map(({ name, isDashed }) =>
      element("span", { className: isDashed ? "key dashed" : "key", text: name })) : [];
    this.box = element("section", { className: "panel", "aria-label": title },
      element("header", {}, element("h2", { text: title, title: help }), this.values),
      this.plot,
      element("footer", {}, element("span", { text: "-15 min" }),
        element("span", { className: "keys" }, ...legend), element("span", { text: "now" })));
    this.plot.onpointermove = (event) => {
      const { left, width } = this.plot.getBoundingClientRect();
      this.point((event.clientX - left) / width);
    };
    this.plot.onpointerleave = this.plot.onblur = () => this.point(null);
    this.plot.onkeydown = (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      event.preventDefault();
      this.point(Math.min(1, Math.max(0, (this.place ?? 1) + way * 0.01)));
    };
  }

  // samples: with `at` in seconds; now: seconds; marks: [{at, kind, words}].
  draw(samples, now, marks, interval) {
    Object.assign(this, { samples, now, marks });
    const all = this.lines.map(({ of }) => samples.map((s) => [s.at, of(s)])
      .filter(([at, value]) => value !== null && now - at <= SPAN));
    const most = Math.max(0, ...all.flat().map(([, value]) => value));
    const hasData = most > 0 || (this.hasZeros && all.some((points) => points.length > 0));
    this.empty.hidden = hasData;
    const top = this.top || niceTop(most);
    this.most.textContent = hasData ? this.format(top) : "";
    const x = (at) => (SPAN - (now - at)).toFixed(1);
    const y = (value) => (HEIGHT - 92 * Math.min(1, value / top)).toFixed(2);
    const drawn = marks.filter(({ at }) => now - at <= SPAN).map(({ at, kind }) =>
      shape("path", { class: `mark ${kind}`, d: `M${x(at)} 0V${HEIGHT}` }));
    all.forEach((points, i) => {
      let path = "", before = -Infinity, run = 0;
      for (const [at, value] of points) {
        const isNew = at - before > GAP * interval;
        if (isNew && run === 1) path += "h.01"; // a value of its own is a dot
        path += `${isNew ? "M" : "L"}${x(at)} ${y(value)}`;
        run = isNew ? 1 : run + 1;
        before = at;
      }
      if (run === 1) path += "h.01";
      if (hasData && path) drawn.push(shape("path", { class: `line line-${i}`, d: path }));
    });
    const grid = shape("path", { class: "grid", d: hasData ? `M0 8H${SPAN}M0 54H${SPAN}` : "" });
    this.svg.replaceChildren(grid, ...drawn);
    const last = samples.findLast((sample) => this.hasValue(sample));
    this.values.textContent = hasData && last ? this.words(last) : "";
    this.point(this.place);
  }

  hasValue(sample) {
    return this.lines.some(({ of }) => of(sample) !== null);
  }

  words(sample) {
    const known = this.lines.map(({ name, of }) => [name, of(sample)]);
    const shown = known.map(([name, value]) => {
      const text = value === null ? "–" : this.format(value);
      return known.length > 1 ? `${name} ${text}` : text;
    });
    return shown.join(" · ");
  }

  // Show the values at a share of the width; null: none.
  point(place) {
    this.place = place;
    const at = this.now - SPAN * (1 - place);
    const nearest = this.samples.filter((s) => this.hasValue(s)).reduce((best, s) =>
      (!best || Math.abs(s.at - at) < Math.abs(best.at - at) ? s : best), null);
    this.tip.hidden = place === null || !nearest;
    this.svg.querySelector(".cross")?.remove();
    if (this.tip.hidden) return;
    const share = 1 - (this.now - nearest.at) / SPAN;
    const marks = this.marks.filter((mark) => mark.at === nearest.at).map(({ words }) => words);
    this.tip.textContent = [clock(nearest.at), this.words(nearest), ...marks].join(" · ");
    this.tip.style.insetInlineStart = `${Math.min(98, Math.max(2, 100 * share))}%`;
    this.tip.style.translate = `${-100 * Math.min(1, Math.max(0, share))}% 0`;
    this.svg.append(shape("path", { class: "cross", d: `M${SPAN * share} 0V${HEIGHT}` }));
  }
}
