/** The light or dark theme: the system's, unless the user has chosen one. */

import { colourRamp, type Theme } from "../colour.ts";
import type { Palette } from "../map/tileImages.ts";
import { Store } from "../store.ts";

export type ThemePreference = "system" | "light" | "dark";

const STORAGE_KEY = "keepleft-theme";
const RAMPS: Record<Theme, Uint8ClampedArray> = { light: colourRamp("light"), dark: colourRamp("dark") };

export class ThemeController {
  readonly preference = new Store<ThemePreference>("system");
  readonly palette: Store<Palette>;
  private readonly system = window.matchMedia("(prefers-color-scheme: dark)");

  constructor(private readonly root: HTMLElement) {
    this.preference.set(storedPreference());
    this.system.addEventListener("change", this.apply);
    this.preference.subscribe(this.apply);
    root.dataset.theme = this.current();
    this.palette = new Store(readPalette(root, this.current()));
  }

  dispose(): void {
    this.system.removeEventListener("change", this.apply);
  }

  current(): Theme {
    const preference = this.preference.get();
    return preference === "system" ? (this.system.matches ? "dark" : "light") : preference;
  }

  toggle(): void {
    const next = this.current() === "dark" ? "light" : "dark";
    this.preference.set(next);
    try {
      localStorage.setItem(STORAGE_KEY, next);
    } catch {
      // Without storage the choice is lost with the page.
    }
  }

  private readonly apply = (): void => {
    this.root.dataset.theme = this.current();
    this.palette.set(readPalette(this.root, this.current()));
  };
}

/** The colours of the style sheet, for drawing on a canvas. */
function readPalette(root: HTMLElement, theme: Theme): Palette {
  const style = getComputedStyle(root);
  const cssVariable = (name: string) => style.getPropertyValue(name).trim();
  return {
    ramp: RAMPS[theme],
    ink: cssVariable("--ink"),
    soft: cssVariable("--soft"),
    line: cssVariable("--line"),
    paper: cssVariable("--card"),
    accent: cssVariable("--accent"),
    alert: cssVariable("--alert"),
    font: cssVariable("--font"),
  };
}

function storedPreference(): ThemePreference {
  try {
    const stored = localStorage.getItem(STORAGE_KEY);
    return stored === "light" || stored === "dark" ? stored : "system";
  } catch {
    return "system";
  }
}
