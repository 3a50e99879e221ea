/** Numbers of the server view in words. */

const UNITS: [seconds: number, name: string][] = [
  [86_400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
];

export function formatCount(value: number): string {
  return value >= 100_000
    ? value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 })
    : value.toLocaleString("en");
}

/** A rate, rounded to what is readable while it changes; "–" where nothing is known yet. */
export function formatRate(value: number | undefined): string {
  if (value === undefined) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : formatCount(Math.round(value));
}

/** A short time: 85 ms, 1.2 s, 45 s. */
export function formatSeconds(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.01) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  return seconds < 10 ? `${seconds.toFixed(1)} s` : formatDuration(seconds);
}

/** A long time, in its two largest units: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
export function formatDuration(seconds: number): string {
  const whole = Math.floor(seconds);
  const n = UNITS.findIndex(([size]) => whole >= size);
  if (n === -1 || n === UNITS.length - 1) return `${whole} s`;
  const [size, name] = UNITS[n],
    [smallerSize, smallerName] = UNITS[n + 1];
  const rest = Math.floor((whole % size) / smallerSize);
  return `${Math.floor(whole / size)} ${name}${rest > 0 ? ` ${rest} ${smallerName}` : ""}`;
}

export function formatBytes(bytes: number): string {
  const gib = bytes / 2 ** 30;
  if (gib >= 1) return `${gib.toFixed(gib < 10 ? 1 : 0)} GiB`;
  return `${(bytes / 2 ** 20).toFixed(bytes < 10 * 2 ** 20 ? 1 : 0)} MiB`;
}

export function formatPercent(fraction: number): string {
  return `${(100 * fraction).toFixed(0)} %`;
}
