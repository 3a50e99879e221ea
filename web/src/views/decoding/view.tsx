/** Decoding: how a text comes about, token by token or beam by beam. */

import { useState } from "preact/hooks";
import type { Dials } from "../../filters.ts";
import { Notice, Segments } from "../../components/controls.tsx";
import { TextFields } from "../../components/textFields.tsx";
import { usePage, useTexts, useWord } from "../../shell/hooks.ts";
import { AlignmentMap } from "./alignment.tsx";
import { BeamSearch } from "./beamSearch.tsx";
import { NEUTRAL } from "./samplingControls.tsx";
import { Distribution } from "./distribution.tsx";
import { useSteps, useVocabulary } from "./useDecoding.ts";
import { WrittenText } from "./generatedText.tsx";

export function DecodingView() {
  const { source, about } = usePage();
  const [texts] = useTexts();
  const pair = about.family === "encoder-decoder";
  const asked = pair ? { ...texts, text: "" } : texts;
  const [way, sayWay] = useWord("by", "token");
  const ways = [
    ["token", "Token by token"],
    ["beam", "Beam search"],
  ] as const;
  const offered = ways.filter(([name]) => source.can(name === "token" ? "next" : "beam"));
  const shown = offered.some(([name]) => name === way) ? way : offered[0]?.[0];
  return (
    <>
      <TextFields act="Begin" target={false} />
      <div class="bar">
        <Segments label="How it is written" value={shown} onChange={sayWay} options={offered} />
      </div>
      {shown === "token" ? <Stepping key={JSON.stringify(asked)} texts={asked} /> : <BeamSearch texts={asked} />}
    </>
  );
}

function Stepping({ texts }: { texts: { text: string; source?: string } }) {
  const { source, about } = usePage();
  const [fixed] = useState(texts);
  const steps = useSteps(fixed);
  const words = useVocabulary();
  const [dials, setDials] = useState<Dials>(NEUTRAL);
  const [choice, setChoice] = useState("likeliest");
  const { next, ranking, written, ended, busy, error } = steps;
  return (
    <>
      <Notice error={error} busy={next === null}>
        The model reads …
      </Notice>
      {next !== null && (
        <>
          <WrittenText
            prompt={about.family === "encoder-decoder" ? [] : next.prompt}
            written={written}
            ended={ended}
            onBack={steps.back}
          />
          <div class="bar">
            <button type="button" class="plain" disabled={steps.count === 0} onClick={() => steps.back()}>
              Back
            </button>
            <button type="button" class="plain" disabled={steps.count === 0} onClick={() => steps.back(0)}>
              From the start
            </button>
            {source.can("write") && (
              <>
                <button type="button" disabled={busy || ended} onClick={() => steps.write(dials, choice === "drawn")}>
                  Write on
                </button>
                <Segments
                  label="Which token it takes"
                  value={choice}
                  onChange={setChoice}
                  options={[
                    ["likeliest", "the likeliest"],
                    ["drawn", "drawn by chance"],
                  ]}
                />
              </>
            )}
          </div>
        </>
      )}
      <div class="columns">
        {ranking !== null && next !== null && (
          <Distribution
            ranking={ranking}
            words={words}
            ends={next.ends}
            dials={dials}
            busy={busy}
            ended={ended}
            onDials={setDials}
            onChoose={steps.choose}
            onBack={() => steps.back()}
          />
        )}
        {about.family === "encoder-decoder" && source.can("alignment") && (
          <AlignmentMap source={fixed.source ?? ""} tokens={written.map(({ id }) => id)} />
        )}
      </div>
    </>
  );
}
