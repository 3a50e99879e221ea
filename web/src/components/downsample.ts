/** At most `maxPoints` points for drawing: the lowest and the highest of each bucket are kept. */
export function downsample(points: [number, number][], maxPoints: number): [number, number][] {
  if (points.length <= maxPoints) return points;
  const kept: [number, number][] = [points[0]];
  const buckets = Math.max(1, Math.floor((maxPoints - 2) / 2));
  for (let n = 0; n < buckets; n++) {
    const from = 1 + Math.floor((n * (points.length - 2)) / buckets),
      to = 1 + Math.floor(((n + 1) * (points.length - 2)) / buckets);
    let low = from,
      high = from;
    for (let i = from; i < to; i++) {
      if (points[i][1] < points[low][1]) low = i;
      if (points[i][1] > points[high][1]) high = i;
    }
    kept.push(points[Math.min(low, high)]);
    if (low !== high) kept.push(points[Math.max(low, high)]);
  }
  kept.push(points[points.length - 1]);
  return kept;
}
