import assert from "node:assert/strict";
import { test } from "node:test";
import { css, distance, lab, type Lab, ramp, type Theme } from "../src/colour.ts";

for (const theme of ["light", "dark"] as Theme[]) {
  const colours = ramp(theme);
  const points: Lab[] = Array.from({ length: 256 }, (_, n) => lab([colours[n * 3], colours[n * 3 + 1], colours[n * 3 + 2]]));

  test(`the ${theme} ramp only ever grows ${theme === "light" ? "darker" : "lighter"}`, () => {
    for (let n = 8; n < 256; n += 8) {
      const change = points[n][0] - points[n - 8][0];
      assert.ok(theme === "light" ? change < 0 : change > 0, `at ${n}: ${change}`);
    }
  });

  test(`the ${theme} ramp is even to the eye`, () => {
    const steps = Array.from({ length: 15 }, (_, n) => distance(points[n * 17], points[(n + 1) * 17]));
    const mean = steps.reduce((a, b) => a + b) / steps.length;
    for (const step of steps) assert.ok(Math.abs(step / mean - 1) < 0.2, `${step} beside ${mean}`);
  });

  test(`the ends of the ${theme} ramp are told apart on grey paper`, () => {
    assert.ok(Math.abs(points[0][0] - points[255][0]) > 0.6);
  });
}

test("a colour is written as CSS, whatever the number", () => {
  assert.match(css(ramp("light"), 2), /^rgb\(\d+ \d+ \d+\)$/);
  assert.equal(css(ramp("light"), -1), css(ramp("light"), 0));
});
