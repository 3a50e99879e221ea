/** What every part of the page is given: where answers come from, what the model is, how it is drawn. */

import { createContext } from "preact";
import { useCallback, useContext, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { About, Answer, Given, Question, Texts } from "../api.ts";
import { useHeld } from "../store.ts";
import type { Palette } from "../map/tileImages.ts";
import { said, type Source } from "../transport/transport.ts";
import type { Place } from "./urlState.ts";
import type { Themed } from "./theme.ts";

export interface Page {
  source: Source;
  about: About;
  place: Place;
  themed: Themed;
}

export const PageContext = createContext<Page | null>(null);

export function usePage(): Page {
  const page = useContext(PageContext);
  if (page === null) throw new Error("a part of the page was drawn outside of it");
  return page;
}

export function usePalette(): Palette {
  return useHeld(usePage().themed.palette);
}

/** A word of the address, and what changes it. */
export function useWord(name: string, fallback: string): [string, (word: string) => void] {
  const { place } = usePage();
  const words = useHeld(place.words);
  const say = useCallback((word: string) => place.say({ [name]: word === fallback ? null : word }), [place, name, fallback]);
  return [words[name] ?? fallback, say];
}

/** The texts that are looked at: the model's example until the reader has typed. */
export function useTexts(): [Texts, (texts: Texts) => void] {
  const { about, place } = usePage();
  const words = useHeld(place.words);
  const pair = about.family === "encoder-decoder";
  const text = words.text ?? about.example.text,
    source = words.source ?? about.example.source ?? "";
  const texts = useMemo<Texts>(() => (pair ? { text, source } : { text }), [text, source, pair]);
  const say = useCallback(
    (wanted: Texts) => {
      const other = (word: string, usual: string) => (word === usual ? null : word);
      place.say({
        text: other(wanted.text, about.example.text),
        source: pair ? other(wanted.source ?? "", about.example.source ?? "") : null,
      });
    },
    [place, about, pair],
  );
  return [texts, say];
}

export interface Asked<T> {
  answer: T | null; // the last one, also while the next is awaited
  error: string;
  busy: boolean;
}

/** The answer to a question; null asks nothing. Of several in a row the last one counts. */
export function useAnswer<Q extends Question>(question: Q, given: Given<Q> | null, again: unknown = 0): Asked<Answer<Q>> {
  const { source } = usePage();
  const [state, set] = useState<Asked<Answer<Q>>>({ answer: null, error: "", busy: given !== null });
  const turn = useRef(0);
  const wanted = given === null ? null : JSON.stringify(given);
  useEffect(() => {
    const mine = ++turn.current;
    if (wanted === null) return;
    set((before) => ({ ...before, busy: true }));
    source.ask(question, JSON.parse(wanted) as Given<Q>).then(
      (answer) => {
        if (mine === turn.current) set({ answer, error: "", busy: false });
      },
      (error: unknown) => {
        if (mine === turn.current) set((before) => ({ answer: before.answer, error: said(error), busy: false }));
      },
    );
  }, [source, question, wanted, again]);
  return state;
}
