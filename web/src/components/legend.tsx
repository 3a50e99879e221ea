/** The legend of a map: its colour ramp, and the marks of the claimed mask. */

import { useEffect, useRef } from "preact/hooks";
import { rampColour } from "../colour.ts";
import { usePalette } from "../shell/hooks.ts";

interface Props {
  low?: string;
  high: string;
  showClaim?: boolean;
  showOutside?: boolean;
  isArcs?: boolean;
}

export function Legend({ low = "0", high, showClaim = true, showOutside = true, isArcs = false }: Props) {
  const palette = usePalette();
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    for (let x = 0; x < 128; x++) {
      context.fillStyle = rampColour(palette.ramp, x / 127);
      context.fillRect(x, 0, 1, 10);
    }
  }, [palette]);
  return (
    <div class="legend muted">
      <span>{low}</span>
      <canvas
        ref={canvas}
        width={128}
        height={10}
        role="img"
        aria-label={`Colour scale from ${low} to ${high}`}
      />
      <span>{high}</span>
      {showClaim && !isArcs && (
        <span class="legend-item">
          <span class="swatch hatched" aria-hidden="true" /> masked out
        </span>
      )}
      {showClaim && !isArcs && showOutside && (
        <span class="legend-item">
          <span class="swatch crossed" aria-hidden="true">
            ☒
          </span>{" "}
          nonzero despite the mask
        </span>
      )}
      {showClaim && isArcs && (
        <span class="legend-item">
          <span class="swatch dashed" aria-hidden="true" /> nonzero despite the mask
        </span>
      )}
    </div>
  );
}

/** A weight, rounded to two or three significant digits. */
export function formatWeight(value: number): string {
  if (value === 0) return "0";
  if (value >= 0.0995) return value.toFixed(2);
  if (value >= 0.001) return value.toFixed(3);
  return value.toExponential(0).replace("e-", "e−");
}
