/** The translate view: a text in, its translation beside it as you type; each sentence opens in the other views. */

import { useMemo } from "preact/hooks";
import type { TranslateParams, TranslatedSentence, View } from "../../api.ts";
import { detectLanguage } from "../../components/tokenStrip.tsx";
import { useDebounced, useExplorer, useQuery, useUrlParam } from "../../shell/hooks.ts";

const DEBOUNCE_MS = 400; // after the last key press

export function TranslateView() {
  const { modelInfo } = useExplorer();
  const languages = Object.entries(modelInfo.languages);
  const [text, setText] = useUrlParam("translate", "Where is the station? We arrived late because of the rain.");
  const [to, setTo] = useUrlParam("to", languages.find(([code]) => code !== "en")?.[0] ?? languages[0][0]);
  const params = useDebounced<TranslateParams>(useMemo(() => ({ text, to }), [text, to]), DEBOUNCE_MS);
  const { answer, error, isLoading } = useQuery("translate", params.text.trim() === "" ? null : params);
  const translation = params.text.trim() === "" ? "" : (answer?.text ?? "");
  return (
    <>
      <div class="chips" role="group" aria-label="Language to write">
        {languages.map(([code, name]) => (
          <button
            type="button"
            key={code}
            class={code === to ? "chip selected" : "chip"}
            aria-pressed={code === to}
            onClick={() => setTo(code)}
          >
            {name}
          </button>
        ))}
      </div>
      <div class="translation">
        <label class="text">
          <span>Text</span>
          <textarea
            rows={6}
            value={text}
            dir="auto"
            lang={detectLanguage([{ text }])}
            placeholder="A text in any of these languages"
            spellcheck={false}
            onInput={(event) => setText(event.currentTarget.value)}
          />
        </label>
        <div class="text">
          <span id="keepleft-translation">{isLoading ? "Translating …" : "Translation"}</span>
          <output dir="auto" lang={to} aria-labelledby="keepleft-translation" aria-live="polite">
            {translation}
          </output>
        </div>
      </div>
      {translation !== "" &&
        (answer?.warnings ?? []).map((warning) => (
          <p class="note" role="status" key={warning}>
            {warning}
          </p>
        ))}
      {error !== "" && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
      {translation !== "" && <SentenceList sentences={answer?.sentences ?? []} />}
    </>
  );
}

function SentenceList({ sentences }: { sentences: TranslatedSentence[] }) {
  const { urlState } = useExplorer();
  const open = (view: View, input: string) =>
    urlState.update({ view, source: input, text: null }, true);
  return (
    <ul class="sentences">
      {sentences.map(({ source, target, input }) => (
        <li key={source}>
          <p dir="auto">{source}</p>
          <p dir="auto">{target}</p>
          <div class="bar">
            <button type="button" class="plain" onClick={() => open("attention", input)}>
              Attention
            </button>
            <button type="button" class="plain" onClick={() => open("decoding", input)}>
              Decoding
            </button>
          </div>
        </li>
      ))}
    </ul>
  );
}
