import assert from "node:assert/strict";
import { test } from "node:test";
import { colourRamp, type Oklab, oklabDistance, rampColour, rgbToOklab, type Theme } from "../src/colour.ts";

for (const theme of ["light", "dark"] as Theme[]) {
  const colours = colourRamp(theme);
  const points: Oklab[] = Array.from({ length: 256 }, (_, n) =>
    rgbToOklab([colours[n * 3], colours[n * 3 + 1], colours[n * 3 + 2]]),
  );

  test(`the ${theme} ramp only gets ${theme === "light" ? "darker" : "lighter"}`, () => {
    for (let n = 8; n < 256; n += 8) {
      const change = points[n][0] - points[n - 8][0];
      assert.ok(theme === "light" ? change < 0 : change > 0, `at ${n}: ${change}`);
    }
  });

  test(`the ${theme} ramp is perceptually uniform`, () => {
    const steps = Array.from({ length: 15 }, (_, n) => oklabDistance(points[n * 17], points[(n + 1) * 17]));
    const mean = steps.reduce((a, b) => a + b) / steps.length;
    for (const step of steps) assert.ok(Math.abs(step / mean - 1) < 0.2, `${step} beside ${mean}`);
  });

  test(`the ends of the ${theme} ramp differ in greyscale`, () => {
    assert.ok(Math.abs(points[0][0] - points[255][0]) > 0.6);
  });
}

test("values outside of the ramp are clamped", () => {
  assert.match(rampColour(colourRamp("light"), 2), /^rgb\(\d+ \d+ \d+\)$/);
  assert.equal(rampColour(colourRamp("light"), -1), rampColour(colourRamp("light"), 0));
});
