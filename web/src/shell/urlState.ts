/** The state of the page in the URL's fragment, so that it can be bookmarked and shared. */

import { Store } from "../store.ts";
import { canonicalJson } from "../transport/transport.ts";

export type UrlParams = Readonly<Record<string, string>>;

const MAX_VALUE_LENGTH = 2000; // characters; longer values are not put into the URL

export class UrlState {
  readonly params: Store<UrlParams>;
  private readonly removeListeners: () => void = () => undefined;

  /** In a notebook the URL is not ours, and the state is kept in memory only. */
  constructor(private readonly usesHash: boolean) {
    this.params = new Store(usesHash ? parseHash(window.location.hash) : {});
    if (!usesHash) return;
    const onChange = () => this.params.set(mergeHash(this.params.get(), window.location.hash));
    window.addEventListener("hashchange", onChange);
    window.addEventListener("popstate", onChange);
    this.removeListeners = () => {
      window.removeEventListener("hashchange", onChange);
      window.removeEventListener("popstate", onChange);
    };
  }

  dispose(): void {
    this.removeListeners();
  }

  /** Change some parameters; "" or null removes one. */
  update(changes: Record<string, string | null>, addHistoryEntry = false): void {
    const entries = Object.entries({ ...this.params.get(), ...changes }).filter(([, value]) => value);
    const params = Object.fromEntries(entries) as UrlParams;
    if (canonicalJson(params) === canonicalJson(this.params.get())) return;
    if (this.usesHash) {
      try {
        window.history[addHistoryEntry ? "pushState" : "replaceState"](null, "", toHash(params));
      } catch {
        // Some frames have no history; the state is still kept in memory.
      }
    }
    this.params.set(params);
  }
}

/** The parameters of a URL's fragment, with the previous values that were too long for it. */
export function mergeHash(previous: UrlParams, hash: string): UrlParams {
  const longEntries = Object.entries(previous).filter(([, value]) => value.length > MAX_VALUE_LENGTH);
  return { ...Object.fromEntries(longEntries), ...parseHash(hash) };
}

export function toHash(params: UrlParams): string {
  const entries = Object.entries(params).filter(([, value]) => value.length <= MAX_VALUE_LENGTH);
  return `#${new URLSearchParams(entries)}`;
}

export function parseHash(hash: string): UrlParams {
  return Object.fromEntries(new URLSearchParams(hash.replace(/^#/, "")));
}
