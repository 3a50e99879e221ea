/** Attention: who reads whom, in every layer and head, and whether the mask allows it. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { Attended, Head } from "../../api.ts";
import { labelsOf } from "../../map/labels.ts";
import type { Mode } from "../../map/mapViewer.ts";
import { Choice, Notice, Segments, Slider, Switch } from "../../components/controls.tsx";
import { TextFields } from "../../components/textFields.tsx";
import { Tokens } from "../../components/tokenStrip.tsx";
import { usePage, useTexts, useWord } from "../../shell/hooks.ts";
import { said } from "../../transport/transport.ts";
import { Heads } from "./headGrid.tsx";
import { Panel, titleOf } from "./panel.tsx";
import { Pointing } from "./hoverState.ts";
import { Readout } from "./readout.tsx";
import { Reading } from "./attentionData.ts";

export function AttentionView() {
  const { source } = usePage();
  const [texts] = useTexts();
  const [reading, setReading] = useState<Reading | null>(null);
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(true);
  const [again, setAgain] = useState(0);
  useEffect(() => {
    let here = true;
    setBusy(true);
    Reading.of(source, texts)
      .then(
        (read) => {
          if (here) {
            setReading(read);
            setError("");
          }
        },
        (wrong: unknown) => {
          if (here) setError(said(wrong));
        },
      )
      .finally(() => {
        if (here) setBusy(false);
      });
    return () => {
      here = false;
    };
  }, [source, texts, again]);
  return (
    <>
      <TextFields act="Read" busy={busy} onAct={() => error !== "" && setAgain(again + 1)} />
      <Notice error={error} busy={busy && reading === null}>
        The model reads …
      </Notice>
      {reading?.shortened && <p class="note">{reading.shortened}</p>}
      {reading !== null && <Read reading={reading} />}
    </>
  );
}

function Read({ reading }: { reading: Reading }) {
  const [name, sayName] = useWord("of", "");
  const [layerWord, sayLayer] = useWord("layer", "0");
  const [headWord, sayHead] = useWord("head", "mean");
  const [mode, sayMode] = useWord("as", "matrix");
  const [claimWord, sayClaim] = useWord("claim", "on");
  const [onlyWord, sayOnly] = useWord("only", "");
  const [least, setLeast] = useState(0.1);

  const all = reading.attentions;
  const chosen = all.find((attended) => attended.name === name) ?? all.find(({ kind }) => kind === "masked") ?? all[0];
  const several = all.length > 1 && onlyWord === "";
  const panels = several ? all : [chosen];
  const head: Head = headWord === "mean" || headWord === "rollout" ? headWord : Math.min(whole(headWord), chosen.heads - 1);
  const layer = Math.min(whole(layerWord), chosen.layers - 1);

  const pointing = useMemo(() => new Pointing(reading), [reading]);
  const labels = useMemo(
    () => ({ text: labelsOf(reading.tokens("text")), source: labelsOf(reading.tokens("source")) }),
    [reading],
  );
  const maps = useMemo(
    () => panels.map((attended) => reading.map(attended, Math.min(layer, attended.layers - 1), headFor(attended, head))),
    [reading, panels.map(({ name: n }) => n).join(), layer, head],
  );
  useEffect(() => pointing.look(maps), [pointing, maps]);

  return (
    <>
      <div class="strips">
        {reading.tokens("source").length > 0 && (
          <Tokens
            title="Source"
            tokens={reading.tokens("source")}
            pointed={pointing.sides.source}
            light={pointing.lights.source}
            onPoint={(token) => pointing.inText("source", token)}
          />
        )}
        {reading.tokens("text").length > 0 && (
          <Tokens
            title={reading.tokens("source").length > 0 ? "Target" : "Text"}
            tokens={reading.tokens("text")}
            pointed={pointing.sides.text}
            light={pointing.lights.text}
            onPoint={(token) => pointing.inText("text", token)}
          />
        )}
        <p class="quiet keyline">
          <span class="sample reads">filled</span> what it reads <span class="sample by">underlined</span> who reads it
        </p>
      </div>
      <div class="bar">
        <Segments
          label="Drawn as"
          value={mode}
          onChange={sayMode}
          options={[
            ["matrix", "Matrix"],
            ["arcs", "Arcs"],
          ]}
        />
        {all.length > 1 && (
          <Choice
            label="Attention"
            value={onlyWord === "" ? "" : chosen.name}
            onChange={(value) => {
              sayOnly(value === "" ? "" : "one");
              if (value !== "") sayName(value);
            }}
            options={[["", "side by side"], ...all.map((attended) => [attended.name, titleOf(attended)] as const)]}
          />
        )}
        <Choice
          label="Layer"
          value={String(layer)}
          onChange={sayLayer}
          options={Array.from({ length: chosen.layers }, (_, n) => [String(n), String(n)])}
        />
        <Choice
          label="Head"
          value={String(head)}
          onChange={sayHead}
          options={[
            ["mean", "mean"],
            ["rollout", "rollout"],
            ...Array.from({ length: chosen.heads }, (_, n) => [String(n), String(n)] as const),
          ]}
        />
        <Switch label="Claimed mask" on={claimWord === "on"} onChange={(on) => sayClaim(on ? "on" : "off")} />
        {mode === "arcs" && (
          <Slider
            label="From weight"
            value={least}
            least={0.01}
            most={0.5}
            step={0.01}
            shown={least.toFixed(2)}
            onChange={setLeast}
          />
        )}
      </div>
      <div class={several ? "attention" : "attention beside"}>
        <div>
          <div class={several ? "panels several" : "panels"}>
            {panels.map((attended, n) => (
              <Panel
                key={attended.name}
                attended={attended}
                map={maps[n]}
                head={head}
                rows={labels[attended.row_side]}
                columns={labels[attended.column_side]}
                pointing={pointing}
                mode={mode as Mode}
                claim={claimWord === "on"}
                least={least}
                alone={!several}
                chosen={attended === chosen}
                onChoose={() => sayName(attended.name)}
              />
            ))}
          </div>
          <Readout reading={reading} pointing={pointing} maps={maps} />
        </div>
        <Heads
          reading={reading}
          attended={chosen}
          layer={layer}
          head={head}
          onChoose={(l, h) => {
            sayLayer(String(l));
            sayHead(String(h));
          }}
        />
      </div>
    </>
  );
}

/** Rollout follows a text through its own layers; between two texts there is the mean instead. */
function headFor(attended: Attended, head: Head): Head {
  if (head === "rollout" && attended.kind === "cross") return "mean";
  return typeof head === "number" ? Math.min(head, attended.heads - 1) : head;
}

function whole(word: string): number {
  const number = Math.floor(Number(word));
  return Number.isFinite(number) && number >= 0 ? number : 0;
}
