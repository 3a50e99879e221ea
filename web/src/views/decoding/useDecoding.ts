/** A text as it grows: the tokens so far, and the scores of what may come next. */

import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Next, Texts, Token } from "../../api.ts";
import { floats } from "../../wire.ts";
import { type Dials, ranked } from "../../filters.ts";
import { usePage } from "../../shell/hooks.ts";
import { said, type Source } from "../../transport/transport.ts";

export interface Ranking {
  scores: Float32Array;
  order: Uint32Array;
}

export interface Steps {
  next: Next | null;
  ranking: Ranking | null;
  written: Token[];
  count: number; // tokens chosen, also those whose scores were refused
  ended: boolean;
  busy: boolean;
  error: string;
  choose(id: number): void;
  back(to?: number): void;
  write(dials: Dials, drawn: boolean): void;
}

const AT_ONCE = 12; // tokens that "write on" adds

/** `texts` stay the same: another text is another use. */
export function useSteps(texts: Texts): Steps {
  const { source } = usePage();
  const [tokens, setTokens] = useState<number[]>([]);
  const [next, setNext] = useState<Next | null>(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const turn = useRef(0);

  useEffect(() => {
    const mine = ++turn.current;
    setBusy(true);
    source
      .ask("next", { ...texts, tokens, unmasked: false })
      .then(
        (answer) => {
          if (mine === turn.current) {
            setNext(answer);
            setError("");
          }
        },
        (wrong: unknown) => {
          if (mine === turn.current) setError(said(wrong));
        },
      )
      .finally(() => {
        if (mine === turn.current) setBusy(false);
      });
  }, [source, texts, tokens]);

  const ranking = useMemo(() => {
    if (next === null) return null;
    const scores = floats(next.scores_f32);
    return { scores, order: ranked(scores) };
  }, [next]);
  const written = next?.written ?? [];
  const ended = written.length > 0 && next!.ends.includes(written[written.length - 1].id);

  const choose = useCallback((id: number) => setTokens((before) => [...before, id]), []);
  const back = useCallback(
    (to?: number) => setTokens((before) => (before.length === 0 ? before : before.slice(0, to ?? before.length - 1))),
    [],
  );
  const write = useCallback(
    (dials: Dials, drawn: boolean) => {
      const mine = ++turn.current;
      const options: Record<string, number | boolean> = drawn
        ? { do_sample: true, temperature: dials.temperature, top_k: dials.topK, top_p: dials.topP, min_p: dials.minP }
        : { do_sample: false };
      setBusy(true);
      source.ask("write", { ...texts, tokens, options, limit: AT_ONCE }).then(
        (answer) => {
          if (mine === turn.current) setTokens([...tokens, ...answer.tokens.map(({ id }) => id)]);
        },
        (wrong: unknown) => {
          if (mine === turn.current) {
            setError(said(wrong));
            setBusy(false);
          }
        },
      );
    },
    [source, texts, tokens],
  );

  return { next, ranking, written, count: tokens.length, ended, busy, error, choose, back, write };
}

const vocabularies = new WeakMap<Source, Promise<string[]>>();

/** The words of all tokens, asked for once. */
export function useVocabulary(): string[] | null {
  const { source } = usePage();
  const [words, setWords] = useState<string[] | null>(null);
  useEffect(() => {
    let asked = vocabularies.get(source);
    if (asked === undefined) {
      asked = source.ask("vocabulary", {}).then((answer) => answer.words);
      vocabularies.set(source, asked);
    }
    asked.then(setWords, () => vocabularies.delete(source)); // tokens go by their numbers then
  }, [source]);
  return words;
}
