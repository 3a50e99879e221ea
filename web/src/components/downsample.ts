/** Fewer points that look the same: the lowest and the highest of each stretch stay. */
export function thinned(points: [number, number][], most: number): [number, number][] {
  if (points.length <= most) return points;
  const out: [number, number][] = [points[0]];
  const stretches = Math.max(1, Math.floor((most - 2) / 2));
  for (let n = 0; n < stretches; n++) {
    const from = 1 + Math.floor((n * (points.length - 2)) / stretches),
      to = 1 + Math.floor(((n + 1) * (points.length - 2)) / stretches);
    let low = from,
      high = from;
    for (let i = from; i < to; i++) {
      if (points[i][1] < points[low][1]) low = i;
      if (points[i][1] > points[high][1]) high = i;
    }
    out.push(points[Math.min(low, high)]);
    if (low !== high) out.push(points[Math.max(low, high)]);
  }
  out.push(points[points.length - 1]);
  return out;
}
