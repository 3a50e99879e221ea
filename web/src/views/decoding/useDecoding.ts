/** Step-by-step decoding: the tokens so far, and the logits of the next one. */

import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { NextTokenAnswer, Texts, Token } from "../../api.ts";
import { rankTokens, type SamplingParams } from "../../filters.ts";
import { useExplorer } from "../../shell/hooks.ts";
import { errorMessage, type Transport } from "../../transport/transport.ts";
import { decodeFloats } from "../../wire.ts";

export interface RankedLogits {
  logits: Float32Array;
  order: Uint32Array;
}

export interface DecodingState {
  next: NextTokenAnswer | null;
  ranked: RankedLogits | null;
  newTokens: Token[];
  count: number; // tokens appended, including those whose logits failed to load
  isFinished: boolean;
  isLoading: boolean;
  error: string;
  append(id: number): void;
  undo(length?: number): void;
  continueText(sampling: SamplingParams, doSample: boolean): void;
}

const CONTINUE_TOKENS = 12; // added by "Continue"

/** `texts` must not change: give the component a key, so that another text starts over. */
export function useDecoding(texts: Texts): DecodingState {
  const { transport } = useExplorer();
  const [tokens, setTokens] = useState<number[]>([]);
  const [next, setNext] = useState<NextTokenAnswer | null>(null);
  const [isLoading, setIsLoading] = useState(false);
  const [error, setError] = useState("");
  const latestRequest = useRef(0);

  useEffect(() => {
    const request = ++latestRequest.current;
    setIsLoading(true);
    transport
      .ask("next_token", { ...texts, tokens, unmasked: false })
      .then(
        (answer) => {
          if (request === latestRequest.current) {
            setNext(answer);
            setError("");
          }
        },
        (reason: unknown) => {
          if (request === latestRequest.current) setError(errorMessage(reason));
        },
      )
      .finally(() => {
        if (request === latestRequest.current) setIsLoading(false);
      });
  }, [transport, texts, tokens]);

  const ranked = useMemo(() => {
    if (next === null) return null;
    const logits = decodeFloats(next.logits_f32);
    return { logits, order: rankTokens(logits) };
  }, [next]);
  const newTokens = next?.new_tokens ?? [];
  const isFinished = newTokens.length > 0 && next!.eos_ids.includes(newTokens[newTokens.length - 1].id);

  const append = useCallback((id: number) => setTokens((previous) => [...previous, id]), []);
  const undo = useCallback(
    (length?: number) =>
      setTokens((previous) =>
        previous.length === 0 ? previous : previous.slice(0, length ?? previous.length - 1),
      ),
    [],
  );
  const continueText = useCallback(
    (sampling: SamplingParams, doSample: boolean) => {
      const request = ++latestRequest.current;
      const options: Record<string, number | boolean> = doSample
        ? {
            do_sample: true,
            temperature: sampling.temperature,
            top_k: sampling.topK,
            top_p: sampling.topP,
            min_p: sampling.minP,
          }
        : { do_sample: false };
      setIsLoading(true);
      transport.ask("continue_text", { ...texts, tokens, options, max_new_tokens: CONTINUE_TOKENS }).then(
        (answer) => {
          if (request === latestRequest.current) setTokens([...tokens, ...answer.tokens.map(({ id }) => id)]);
        },
        (reason: unknown) => {
          if (request === latestRequest.current) {
            setError(errorMessage(reason));
            setIsLoading(false);
          }
        },
      );
    },
    [transport, texts, tokens],
  );

  const count = tokens.length;
  return { next, ranked, newTokens, count, isFinished, isLoading, error, append, undo, continueText };
}

const vocabularies = new WeakMap<Transport, Promise<string[]>>();

/** The texts of all tokens, loaded once. */
export function useVocabulary(): string[] | null {
  const { transport } = useExplorer();
  const [vocabulary, setVocabulary] = useState<string[] | null>(null);
  useEffect(() => {
    let promise = vocabularies.get(transport);
    if (promise === undefined) {
      promise = transport.ask("vocabulary", {}).then((answer) => answer.tokens);
      vocabularies.set(transport, promise);
    }
    promise.then(setVocabulary, () => vocabularies.delete(transport)); // without it token ids are shown
  }, [transport]);
  return vocabulary;
}
