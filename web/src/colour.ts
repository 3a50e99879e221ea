/** A perceptually uniform colour ramp for weights: equal steps in OKLab, from background to foreground. */

export type Theme = "light" | "dark";
export type Oklab = [lightness: number, a: number, b: number];

interface ColourStop {
  lightness: number;
  chroma: number;
  hue: number;
}

// Lightness is monotonic, so that the order is visible in greyscale and with any kind of colour vision.
const STOPS: Record<Theme, ColourStop[]> = {
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

const PATH_SAMPLES = 1024;

/** 256 colours as RGB bytes. */
export function colourRamp(theme: Theme): Uint8ClampedArray {
  const points = resampleEvenly(interpolateStops(STOPS[theme]), 256);
  const colours = new Uint8ClampedArray(256 * 3);
  points.forEach((point, n) => colours.set(oklabToRgb(point), n * 3));
  return colours;
}

/** The CSS colour of a value from 0 to 1. */
export function rampColour(ramp: Uint8ClampedArray, value: number): string {
  const n = Math.max(0, Math.min(255, Math.round(value * 255))) * 3;
  return `rgb(${ramp[n]} ${ramp[n + 1]} ${ramp[n + 2]})`;
}

function interpolateStops(stops: ColourStop[]): Oklab[] {
  return Array.from({ length: PATH_SAMPLES }, (_, n) => {
    const t = (n / (PATH_SAMPLES - 1)) * (stops.length - 1);
    const index = Math.min(Math.floor(t), stops.length - 2);
    const from = stops[index],
      to = stops[index + 1];
    const mix = (a: number, b: number) => a + (b - a) * (t - index);
    const angle = (mix(from.hue, to.hue) * Math.PI) / 180;
    const chroma = mix(from.chroma, to.chroma);
    return [mix(from.lightness, to.lightness), chroma * Math.cos(angle), chroma * Math.sin(angle)] as Oklab;
  });
}

/** Points at equal distances along a path. */
function resampleEvenly(points: Oklab[], count: number): Oklab[] {
  const lengths = [0];
  for (let n = 1; n < points.length; n++) {
    lengths.push(lengths[n - 1] + oklabDistance(points[n - 1], points[n]));
  }
  const samples: Oklab[] = [];
  for (let n = 0, index = 0; n < count; n++) {
    const target = (lengths[lengths.length - 1] * n) / (count - 1);
    while (index < points.length - 2 && lengths[index + 1] < target) index++;
    const fraction = (target - lengths[index]) / (lengths[index + 1] - lengths[index]);
    samples.push(points[index].map((value, i) => value + (points[index + 1][i] - value) * fraction) as Oklab);
  }
  return samples;
}

export function oklabDistance(a: Oklab, b: Oklab): number {
  return Math.hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
}

/** OKLab (Ottosson 2020) to sRGB bytes. */
export function oklabToRgb([lightness, a, b]: Oklab): [number, number, number] {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    gammaEncode(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    gammaEncode(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    gammaEncode(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

/** sRGB bytes to OKLab. */
export function rgbToOklab([red, green, blue]: [number, number, number]): Oklab {
  const [r, g, b] = [red, green, blue].map(gammaDecode);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function gammaEncode(value: number): number {
  const x = Math.max(0, Math.min(1, value));
  return 255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);
}

function gammaDecode(byte: number): number {
  const x = byte / 255;
  return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
}
