/** Light or dark: as the system has it, unless the reader has said otherwise. */

import type { Palette } from "../map/tileImages.ts";
import { ramp, type Theme } from "../colour.ts";
import { Held } from "../store.ts";

export type Wish = "system" | "light" | "dark";

const KEPT = "keepleft-theme";
const RAMPS: Record<Theme, Uint8ClampedArray> = { light: ramp("light"), dark: ramp("dark") };

export class Themed {
  readonly wish = new Held<Wish>("system");
  readonly palette: Held<Palette>;
  private readonly system = window.matchMedia("(prefers-color-scheme: dark)");

  constructor(private readonly root: HTMLElement) {
    this.wish.set(remembered());
    this.system.addEventListener("change", this.apply);
    this.wish.listen(this.apply);
    root.dataset.theme = this.theme();
    this.palette = new Held(paletteOf(root, this.theme()));
  }

  end(): void {
    this.system.removeEventListener("change", this.apply);
  }

  theme(): Theme {
    const wish = this.wish.get();
    return wish === "system" ? (this.system.matches ? "dark" : "light") : wish;
  }

  turn(): void {
    const next = this.theme() === "dark" ? "light" : "dark";
    this.wish.set(next);
    try {
      localStorage.setItem(KEPT, next);
    } catch {
      // Then it is forgotten with the page.
    }
  }

  private readonly apply = (): void => {
    this.root.dataset.theme = this.theme();
    this.palette.set(paletteOf(this.root, this.theme()));
  };
}

/** The colours of the style sheet, for what is drawn on a canvas. */
function paletteOf(root: HTMLElement, theme: Theme): Palette {
  const style = getComputedStyle(root);
  const named = (name: string) => style.getPropertyValue(name).trim();
  return {
    ramp: RAMPS[theme],
    ink: named("--ink"),
    soft: named("--soft"),
    line: named("--line"),
    paper: named("--card"),
    accent: named("--accent"),
    alert: named("--alert"),
    font: named("--face"),
  };
}

function remembered(): Wish {
  try {
    const kept = localStorage.getItem(KEPT);
    return kept === "light" || kept === "dark" ? kept : "system";
  } catch {
    return "system";
  }
}
