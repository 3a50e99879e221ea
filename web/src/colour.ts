/** One ramp for weights, evenly spaced to the eye: equal steps of OKLab, from the colour of the paper to that of the ink. */

export type Theme = "light" | "dark";
export type Lab = [lightness: number, a: number, b: number];

interface Stop {
  lightness: number;
  chroma: number;
  hue: number;
}

// Lightness only ever falls (or rises), so that the order survives on grey paper and for every kind of colour vision.
const STOPS: Record<Theme, Stop[]> = {
  light: [
    { lightness: 0.985, chroma: 0.004, hue: 210 },
    { lightness: 0.85, chroma: 0.07, hue: 215 },
    { lightness: 0.6, chroma: 0.125, hue: 245 },
    { lightness: 0.27, chroma: 0.12, hue: 280 },
  ],
  dark: [
    { lightness: 0.215, chroma: 0.012, hue: 265 },
    { lightness: 0.42, chroma: 0.11, hue: 275 },
    { lightness: 0.68, chroma: 0.12, hue: 215 },
    { lightness: 0.95, chroma: 0.1, hue: 110 },
  ],
};

const FINE = 1024;

/** 256 colours as bytes of red, green, blue. */
export function ramp(theme: Theme): Uint8ClampedArray {
  const points = evenly(path(STOPS[theme]), 256);
  const out = new Uint8ClampedArray(256 * 3);
  points.forEach((point, n) => out.set(rgb(point), n * 3));
  return out;
}

export function css(colours: Uint8ClampedArray, value: number): string {
  const n = Math.max(0, Math.min(255, Math.round(value * 255))) * 3;
  return `rgb(${colours[n]} ${colours[n + 1]} ${colours[n + 2]})`;
}

function path(stops: Stop[]): Lab[] {
  return Array.from({ length: FINE }, (_, n) => {
    const t = (n / (FINE - 1)) * (stops.length - 1);
    const at = Math.min(Math.floor(t), stops.length - 2);
    const from = stops[at],
      to = stops[at + 1];
    const between = (a: number, b: number) => a + (b - a) * (t - at);
    const angle = (between(from.hue, to.hue) * Math.PI) / 180;
    const chroma = between(from.chroma, to.chroma);
    return [between(from.lightness, to.lightness), chroma * Math.cos(angle), chroma * Math.sin(angle)] as Lab;
  });
}

/** Points of a path at equal distances along it. */
function evenly(points: Lab[], count: number): Lab[] {
  const along = [0];
  for (let n = 1; n < points.length; n++) along.push(along[n - 1] + distance(points[n - 1], points[n]));
  const out: Lab[] = [];
  for (let n = 0, at = 0; n < count; n++) {
    const wanted = (along[along.length - 1] * n) / (count - 1);
    while (at < points.length - 2 && along[at + 1] < wanted) at++;
    const share = (wanted - along[at]) / (along[at + 1] - along[at]);
    out.push(points[at].map((value, i) => value + (points[at + 1][i] - value) * share) as Lab);
  }
  return out;
}

export function distance(a: Lab, b: Lab): number {
  return Math.hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
}

/** OKLab (Ottosson 2020) to sRGB bytes. */
export function rgb([lightness, a, b]: Lab): [number, number, number] {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    encoded(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    encoded(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    encoded(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

/** sRGB bytes to OKLab. */
export function lab([red, green, blue]: [number, number, number]): Lab {
  const [r, g, b] = [red, green, blue].map(linear);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function encoded(value: number): number {
  const x = Math.max(0, Math.min(1, value));
  return 255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);
}

function linear(byte: number): number {
  const x = byte / 255;
  return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
}
