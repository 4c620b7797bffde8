// The text of /metrics as numbers.

// Return Map(name -> [{labels, value}]).
export function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const found = line.match(/^([\w:]+)(?:\{(.*)\})? (\S+)/);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(/(\w+)="((?:\\.|[^"])*)"/g)]
      .map(([, name, value]) => [name, value]));
    if (!series.has(found[1])) series.set(found[1], []);
    series.get(found[1]).push({ labels, value: Number(found[3]) });
  }
  return series;
}

export const valueOf = (series, name) => series.get(name)?.[0].value ?? 0;
