/** Entry point: mount() for a page, render() for a notebook; on the explorer's own page it mounts itself. */

import "./styles/explorer.css";
import { h, render as renderPreact } from "preact";
import { App } from "./shell/app.tsx";
import { ThemeController } from "./shell/theme.ts";
import { UrlState } from "./shell/urlState.ts";
import { HttpTransport } from "./transport/http.ts";
import { type SnapshotEntry, SnapshotTransport } from "./transport/snapshot.ts";
import type { Transport } from "./transport/transport.ts";
import { type WidgetModel, WidgetTransport } from "./transport/widget.ts";

export { HttpTransport, SnapshotTransport, WidgetTransport };
export type { Transport };

/**
 * Render the explorer into an element; returns a function that unmounts it. `standalone`: it has the page to
 * itself, so it also handles the keys of the document and keeps its state in the URL.
 */
export function mount(element: HTMLElement, transport: Transport, { standalone = true } = {}): () => void {
  element.classList.add("keepleft");
  const theme = new ThemeController(element),
    urlState = new UrlState(standalone);
  renderPreact(h(App, { transport, urlState, theme, keyTarget: standalone ? document : element }), element);
  return () => {
    renderPreact(null, element);
    theme.dispose();
    urlState.dispose();
  };
}

/** The interface of an anywidget module. */
export default {
  render({ model, el }: { model: WidgetModel; el: HTMLElement }): () => void {
    const transport = new WidgetTransport(model);
    const unmount = mount(el, transport, { standalone: false });
    return () => {
      unmount();
      transport.close();
    };
  },
};

/** Mount on a file that contains a snapshot, or on the page of a server. */
function autoMount(): void {
  const element = document.getElementById("keepleft");
  if (element === null || element.childElementCount > 0) return;
  const snapshot = document.getElementById("keepleft-snapshot");
  if (snapshot !== null) {
    mount(element, new SnapshotTransport(JSON.parse(snapshot.textContent ?? "[]") as SnapshotEntry[]));
  } else if (element.dataset.apiUrl !== undefined) {
    const apiUrl = new URL(element.dataset.apiUrl, document.baseURI).href;
    mount(element, new HttpTransport(apiUrl, element.dataset.statusUrl));
  }
}

if (typeof document !== "undefined") autoMount();
