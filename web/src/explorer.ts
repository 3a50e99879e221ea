/** The doors of the module: mount() for a page, render() for a notebook, and a start of its own where its page is there. */

import "./styles/explorer.css";
import { h, render as draw } from "preact";
import { App } from "./shell/app.tsx";
import { Place } from "./shell/urlState.ts";
import { Themed } from "./shell/theme.ts";
import { HttpSource } from "./transport/http.ts";
import { RecordedSource, type Recording } from "./transport/snapshot.ts";
import type { Source } from "./transport/transport.ts";
import { type WidgetModel, WidgetSource } from "./transport/widget.ts";

export { HttpSource, RecordedSource, WidgetSource };
export type { Source };

/** Draw it into an element; gives back what takes it away. `whole`: the page is its own, keys and address included. */
export function mount(element: HTMLElement, source: Source, { whole = true } = {}): () => void {
  element.classList.add("keepleft");
  const themed = new Themed(element),
    place = new Place(whole);
  draw(h(App, { source, place, themed, keys: whole ? document : element }), element);
  return () => {
    draw(null, element);
    themed.end();
    place.end();
  };
}

/** As anywidget wants it. */
export default {
  render({ model, el }: { model: WidgetModel; el: HTMLElement }): () => void {
    const source = new WidgetSource(model);
    const end = mount(el, source, { whole: false });
    return () => {
      end();
      source.close();
    };
  },
};

/** A file with its answers in it, or the page of a server. */
function start(): void {
  const element = document.getElementById("keepleft");
  if (element === null || element.childElementCount > 0) return;
  const answers = document.getElementById("keepleft-answers");
  if (answers !== null) mount(element, new RecordedSource(JSON.parse(answers.textContent ?? "[]") as Recording[]));
  else if (element.dataset.door !== undefined)
    mount(element, new HttpSource(new URL(element.dataset.door, document.baseURI).href));
}

if (typeof document !== "undefined") start();
