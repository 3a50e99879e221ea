/** What colours and hatching mean. */

import { useEffect, useRef } from "preact/hooks";
import { css } from "../colour.ts";
import { usePalette } from "../shell/hooks.ts";

interface Props {
  low?: string;
  high: string;
  claim?: boolean;
  strays?: boolean;
  arcs?: boolean;
}

export function Legend({ low = "0", high, claim = true, strays = true, arcs = false }: Props) {
  const palette = usePalette();
  const bar = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const context = bar.current!.getContext("2d")!;
    for (let x = 0; x < 128; x++) {
      context.fillStyle = css(palette.ramp, x / 127);
      context.fillRect(x, 0, 1, 10);
    }
  }, [palette]);
  return (
    <div class="legend quiet">
      <span>{low}</span>
      <canvas ref={bar} width={128} height={10} role="img" aria-label={`Colours from ${low} to ${high}`} />
      <span>{high}</span>
      {claim && !arcs && (
        <span class="pair">
          <span class="swatch hatched" aria-hidden="true" /> may not be read
        </span>
      )}
      {claim && !arcs && strays && (
        <span class="pair">
          <span class="swatch crossed" aria-hidden="true">
            ☒
          </span>{" "}
          read all the same
        </span>
      )}
      {claim && arcs && (
        <span class="pair">
          <span class="swatch dashed" aria-hidden="true" /> read against the mask
        </span>
      )}
    </div>
  );
}

/** A weight with as many digits as say something. */
export function digits(value: number): string {
  if (value === 0) return "0";
  if (value >= 0.0995) return value.toFixed(2);
  if (value >= 0.001) return value.toFixed(3);
  return value.toExponential(0).replace("e-", "e−");
}
