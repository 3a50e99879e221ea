/** The explorer's context, and hooks for its transport, URL state and palette. */

import { createContext } from "preact";
import { useCallback, useContext, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Answer, ModelInfo, Params, Question, Texts } from "../api.ts";
import type { Palette } from "../map/tileImages.ts";
import { useStore } from "../store.ts";
import { errorMessage, type Transport } from "../transport/transport.ts";
import type { AuditMonitor } from "../views/leaks/auditMonitor.ts";
import type { ThemeController } from "./theme.ts";
import type { UrlState } from "./urlState.ts";

export interface ExplorerContextValue {
  transport: Transport;
  modelInfo: ModelInfo;
  urlState: UrlState;
  theme: ThemeController;
  auditMonitor: AuditMonitor; // an audit goes on while another view is open
}

export const ExplorerContext = createContext<ExplorerContextValue | null>(null);

export function useExplorer(): ExplorerContextValue {
  const context = useContext(ExplorerContext);
  if (context === null) throw new Error("useExplorer was called outside of the explorer");
  return context;
}

export function usePalette(): Palette {
  return useStore(useExplorer().theme.palette);
}

/** A parameter of the URL's fragment, and its setter. */
export function useUrlParam(name: string, fallback: string): [string, (value: string) => void] {
  const { urlState } = useExplorer();
  const urlParams = useStore(urlState.params);
  const setParam = useCallback(
    (value: string) => urlState.update({ [name]: value === fallback ? null : value }),
    [urlState, name, fallback],
  );
  return [urlParams[name] ?? fallback, setParam];
}

/** The model's input, and its setter: the example of the model until the user enters a text. */
export function useTexts(): [Texts, (texts: Texts) => void] {
  const { modelInfo, urlState } = useExplorer();
  const urlParams = useStore(urlState.params);
  const isEncoderDecoder = modelInfo.family === "encoder-decoder";
  const text = urlParams.text ?? modelInfo.example.text,
    source = urlParams.source ?? modelInfo.example.source ?? "";
  const texts = useMemo<Texts>(
    () => (isEncoderDecoder ? { text, source } : { text }),
    [text, source, isEncoderDecoder],
  );
  const setTexts = useCallback(
    (newTexts: Texts) => {
      const unlessDefault = (value: string, defaultValue: string) => (value === defaultValue ? null : value);
      const { example } = modelInfo;
      urlState.update({
        text: unlessDefault(newTexts.text, example.text),
        source: isEncoderDecoder ? unlessDefault(newTexts.source ?? "", example.source ?? "") : null,
      });
    },
    [urlState, modelInfo, isEncoderDecoder],
  );
  return [texts, setTexts];
}

export interface QueryState<T> {
  answer: T | null; // the last one, also while the next is loading
  error: string;
  isLoading: boolean;
}

/** The answer to a question, unless `params` is null. Answers to outdated parameters are dropped. */
export function useQuery<Q extends Question>(question: Q, params: Params<Q> | null): QueryState<Answer<Q>> {
  const { transport } = useExplorer();
  const [state, setState] = useState<QueryState<Answer<Q>>>({
    answer: null,
    error: "",
    isLoading: params !== null,
  });
  const latestRequest = useRef(0);
  const paramsJson = params === null ? null : JSON.stringify(params);
  useEffect(() => {
    const request = ++latestRequest.current;
    if (paramsJson === null) return;
    setState((previous) => ({ ...previous, isLoading: true }));
    transport.ask(question, JSON.parse(paramsJson) as Params<Q>).then(
      (answer) => {
        if (request === latestRequest.current) setState({ answer, error: "", isLoading: false });
      },
      (error: unknown) => {
        if (request !== latestRequest.current) return;
        setState((previous) => ({ answer: previous.answer, error: errorMessage(error), isLoading: false }));
      },
    );
  }, [transport, question, paramsJson]);
  return state;
}

/** A value, once it has not changed for so many milliseconds. */
export function useDebounced<T>(value: T, milliseconds: number): T {
  const [debounced, setDebounced] = useState(value);
  useEffect(() => {
    const timer = window.setTimeout(() => setDebounced(value), milliseconds);
    return () => window.clearTimeout(timer);
  }, [value, milliseconds]);
  return debounced;
}
