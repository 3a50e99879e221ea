/** The decoding view: token by token, or with beam search. */

import { useState } from "preact/hooks";
import { SegmentedControl, Status } from "../../components/controls.tsx";
import { TextFields } from "../../components/textFields.tsx";
import type { SamplingParams } from "../../filters.ts";
import { useExplorer, useTexts, useUrlParam } from "../../shell/hooks.ts";
import { AlignmentMap } from "./alignment.tsx";
import { BeamSearch } from "./beamSearch.tsx";
import { Distribution } from "./distribution.tsx";
import { GeneratedText } from "./generatedText.tsx";
import { DEFAULT_SAMPLING } from "./samplingControls.tsx";
import { useDecoding, useVocabulary } from "./useDecoding.ts";

export function DecodingView() {
  const { transport, modelInfo } = useExplorer();
  const [texts] = useTexts();
  const isEncoderDecoder = modelInfo.family === "encoder-decoder";
  const promptTexts = isEncoderDecoder ? { ...texts, text: "" } : texts;
  const [method, setMethod] = useUrlParam("decoding", "token");
  const methods = [
    ["token", "Token by token"],
    ["beam", "Beam search"],
  ] as const;
  const available = methods.filter(([name]) => transport.supports(name === "token" ? "next_token" : "beam"));
  const selected = available.some(([name]) => name === method) ? method : available[0]?.[0];
  return (
    <>
      <TextFields submitLabel="Start" showTarget={false} />
      <div class="bar">
        <SegmentedControl
          label="Decoding method"
          value={selected}
          onChange={setMethod}
          options={available}
        />
      </div>
      {selected === "token" ? (
        <TokenByToken key={JSON.stringify(promptTexts)} texts={promptTexts} />
      ) : (
        <BeamSearch texts={promptTexts} />
      )}
    </>
  );
}

function TokenByToken({ texts }: { texts: { text: string; source?: string } }) {
  const { transport, modelInfo } = useExplorer();
  const [initialTexts] = useState(texts);
  const decoding = useDecoding(initialTexts);
  const vocabulary = useVocabulary();
  const [sampling, setSampling] = useState<SamplingParams>(DEFAULT_SAMPLING);
  const [strategy, setStrategy] = useState("greedy");
  const { next, ranked, newTokens, isFinished, isLoading, error } = decoding;
  return (
    <>
      <Status error={error} isLoading={next === null}>
        Running the model …
      </Status>
      {next !== null && (
        <>
          <GeneratedText
            prompt={modelInfo.family === "encoder-decoder" ? [] : next.prompt}
            newTokens={newTokens}
            isFinished={isFinished}
            onUndo={decoding.undo}
          />
          <div class="bar">
            <button
              type="button"
              class="plain"
              disabled={decoding.count === 0}
              onClick={() => decoding.undo()}
            >
              Undo
            </button>
            <button
              type="button"
              class="plain"
              disabled={decoding.count === 0}
              onClick={() => decoding.undo(0)}
            >
              Start over
            </button>
            {transport.supports("continue_text") && (
              <>
                <button
                  type="button"
                  disabled={isLoading || isFinished}
                  onClick={() => decoding.continueText(sampling, strategy === "sample")}
                >
                  Continue
                </button>
                <SegmentedControl
                  label="Decoding strategy"
                  value={strategy}
                  onChange={setStrategy}
                  options={[
                    ["greedy", "greedy"],
                    ["sample", "sampling"],
                  ]}
                />
              </>
            )}
          </div>
        </>
      )}
      <div class="columns">
        {ranked !== null && next !== null && (
          <Distribution
            ranked={ranked}
            vocabulary={vocabulary}
            eosIds={next.eos_ids}
            sampling={sampling}
            isLoading={isLoading}
            isFinished={isFinished}
            onSamplingChange={setSampling}
            onSelect={decoding.append}
            onUndo={() => decoding.undo()}
          />
        )}
        {modelInfo.family === "encoder-decoder" && transport.supports("alignment") && (
          <AlignmentMap source={initialTexts.source ?? ""} tokens={newTokens.map(({ id }) => id)} />
        )}
      </div>
    </>
  );
}
