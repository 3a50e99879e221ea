/** What the reader looks at, as words: kept in the address after the #, so that it can be sent and found again. */

import { Held } from "../store.ts";
import { canonical } from "../transport/transport.ts";

export type Words = Readonly<Record<string, string>>;

const LONGEST = 2000; // characters of one value: a long text does not belong into an address

export class Place {
  readonly words: Held<Words>;
  private readonly end_: () => void = () => undefined;

  /** In a notebook the address belongs to others, and the words are kept in memory alone. */
  constructor(private readonly inAddress: boolean) {
    this.words = new Held(inAddress ? parsed(window.location.hash) : {});
    if (!inAddress) return;
    const changed = () => this.words.set(found(this.words.get(), window.location.hash));
    window.addEventListener("hashchange", changed);
    window.addEventListener("popstate", changed);
    this.end_ = () => {
      window.removeEventListener("hashchange", changed);
      window.removeEventListener("popstate", changed);
    };
  }

  end(): void {
    this.end_();
  }

  /** A word that is "" or null is taken out. `step`: the way back leads here. */
  say(words: Record<string, string | null>, step = false): void {
    const all = Object.fromEntries(Object.entries({ ...this.words.get(), ...words }).filter(([, word]) => word)) as Words;
    if (canonical(all) === canonical(this.words.get())) return;
    if (this.inAddress) {
      try {
        window.history[step ? "pushState" : "replaceState"](null, "", hashed(all));
      } catch {
        // Some frames have no history; the words live on in memory.
      }
    }
    this.words.set(all);
  }
}

/** What an address says, and the long words that none can say. */
export function found(before: Words, hash: string): Words {
  return { ...Object.fromEntries(Object.entries(before).filter(([, word]) => word.length > LONGEST)), ...parsed(hash) };
}

export function hashed(words: Words): string {
  const short = Object.entries(words).filter(([, word]) => word.length <= LONGEST);
  return `#${new URLSearchParams(short)}`;
}

export function parsed(hash: string): Words {
  return Object.fromEntries(new URLSearchParams(hash.replace(/^#/, "")));
}
