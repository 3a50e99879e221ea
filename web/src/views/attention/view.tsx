/** The attention view: the maps of every layer and head, with the claimed mask over them. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { AttentionInfo, Head } from "../../api.ts";
import { SegmentedControl, Select, Slider, Status, Switch } from "../../components/controls.tsx";
import { TextFields } from "../../components/textFields.tsx";
import { TokenStrip } from "../../components/tokenStrip.tsx";
import { tokenLabels } from "../../map/labels.ts";
import type { MapMode } from "../../map/mapViewer.ts";
import { useExplorer, useTexts, useUrlParam } from "../../shell/hooks.ts";
import { errorMessage } from "../../transport/transport.ts";
import { AttentionData } from "./attentionData.ts";
import { HeadGrid } from "./headGrid.tsx";
import { HoverState } from "./hoverState.ts";
import { AttentionPanel, attentionTitle } from "./panel.tsx";
import { Readout } from "./readout.tsx";

export function AttentionView() {
  const { transport } = useExplorer();
  const [texts] = useTexts();
  const [data, setData] = useState<AttentionData | null>(null);
  const [error, setError] = useState("");
  const [isLoading, setIsLoading] = useState(true);
  const [retries, setRetries] = useState(0);
  useEffect(() => {
    let isActive = true;
    setIsLoading(true);
    AttentionData.load(transport, texts)
      .then(
        (loaded) => {
          if (isActive) {
            setData(loaded);
            setError("");
          }
        },
        (reason: unknown) => {
          if (isActive) setError(errorMessage(reason));
        },
      )
      .finally(() => {
        if (isActive) setIsLoading(false);
      });
    return () => {
      isActive = false;
    };
  }, [transport, texts, retries]);
  return (
    <>
      <TextFields
        submitLabel="Show attention"
        isLoading={isLoading}
        onSubmit={() => error !== "" && setRetries(retries + 1)}
      />
      <Status error={error} isLoading={isLoading && data === null}>
        Running the model …
      </Status>
      {data?.truncated && <p class="note">{data.truncated}</p>}
      {data !== null && <AttentionMaps data={data} />}
    </>
  );
}

function AttentionMaps({ data }: { data: AttentionData }) {
  const [name, setName] = useUrlParam("attention", "");
  const [layerParam, setLayer] = useUrlParam("layer", "0");
  const [headParam, setHead] = useUrlParam("head", "mean");
  const [mode, setMode] = useUrlParam("plot", "matrix");
  const [claimParam, setClaim] = useUrlParam("claim", "on");
  const [onlyParam, setOnly] = useUrlParam("only", "");
  const [minWeight, setMinWeight] = useState(0.1);

  const attentions = data.attentions;
  const selected =
    attentions.find((attention) => attention.name === name) ??
    attentions.find(({ kind }) => kind === "masked") ??
    attentions[0];
  const isSideBySide = attentions.length > 1 && onlyParam === "";
  const shownAttentions = isSideBySide ? attentions : [selected];
  const head: Head =
    headParam === "mean" || headParam === "rollout"
      ? headParam
      : Math.min(parseIndex(headParam), selected.heads - 1);
  const layer = Math.min(parseIndex(layerParam), selected.layers - 1);

  const hover = useMemo(() => new HoverState(data), [data]);
  const labels = useMemo(
    () => ({ text: tokenLabels(data.tokens("text")), source: tokenLabels(data.tokens("source")) }),
    [data],
  );
  const maps = useMemo(
    () =>
      shownAttentions.map((attention) => {
        const shownLayer = Math.min(layer, attention.layers - 1);
        return data.map(attention, shownLayer, supportedHead(attention, head));
      }),
    [data, shownAttentions.map(({ name: n }) => n).join(), layer, head],
  );
  useEffect(() => hover.setMaps(maps), [hover, maps]);

  return (
    <>
      <div class="token-strips">
        {data.tokens("source").length > 0 && (
          <TokenStrip
            title="Source"
            tokens={data.tokens("source")}
            hovered={hover.hoveredTokens.source}
            highlight={hover.highlights.source}
            onHover={(token) => hover.hoverToken("source", token)}
          />
        )}
        {data.tokens("text").length > 0 && (
          <TokenStrip
            title={data.tokens("source").length > 0 ? "Target" : "Text"}
            tokens={data.tokens("text")}
            hovered={hover.hoveredTokens.text}
            highlight={hover.highlights.text}
            onHover={(token) => hover.hoverToken("text", token)}
          />
        )}
        <p class="muted token-legend">
          <span class="sample attends-to">filled</span> attends to{" "}
          <span class="sample attended-by">underlined</span> attended by
        </p>
      </div>
      <div class="bar">
        <SegmentedControl
          label="Plot"
          value={mode}
          onChange={setMode}
          options={[
            ["matrix", "Matrix"],
            ["arcs", "Arcs"],
          ]}
        />
        {attentions.length > 1 && (
          <Select
            label="Attention"
            value={onlyParam === "" ? "" : selected.name}
            onChange={(value) => {
              setOnly(value === "" ? "" : "one");
              if (value !== "") setName(value);
            }}
            options={[
              ["", "side by side"],
              ...attentions.map((attention) => [attention.name, attentionTitle(attention)] as const),
            ]}
          />
        )}
        <Select
          label="Layer"
          value={String(layer)}
          onChange={setLayer}
          options={Array.from({ length: selected.layers }, (_, n) => [String(n), String(n)])}
        />
        <Select
          label="Head"
          value={String(head)}
          onChange={setHead}
          options={[
            ["mean", "mean"],
            ["rollout", "rollout"],
            ...Array.from({ length: selected.heads }, (_, n) => [String(n), String(n)] as const),
          ]}
        />
        <Switch
          label="Claimed mask"
          checked={claimParam === "on"}
          onChange={(checked) => setClaim(checked ? "on" : "off")}
        />
        {mode === "arcs" && (
          <Slider
            label="Min weight"
            value={minWeight}
            min={0.01}
            max={0.5}
            step={0.01}
            valueText={minWeight.toFixed(2)}
            onChange={setMinWeight}
          />
        )}
      </div>
      <div class={isSideBySide ? "attention" : "attention with-head-column"}>
        <div>
          <div class={isSideBySide ? "panels side-by-side" : "panels"}>
            {shownAttentions.map((attention, n) => (
              <AttentionPanel
                key={attention.name}
                attention={attention}
                map={maps[n]}
                head={head}
                rows={labels[attention.row_side]}
                columns={labels[attention.column_side]}
                hover={hover}
                mode={mode as MapMode}
                showClaim={claimParam === "on"}
                minWeight={minWeight}
                isOnly={!isSideBySide}
                isSelected={attention === selected}
                onSelect={() => setName(attention.name)}
              />
            ))}
          </div>
          <Readout data={data} hover={hover} maps={maps} />
        </div>
        <HeadGrid
          data={data}
          attention={selected}
          layer={layer}
          head={head}
          onSelect={(l, h) => {
            setLayer(String(l));
            setHead(String(h));
          }}
        />
      </div>
    </>
  );
}

/** Rollout exists for self-attention only; cross-attention shows the mean instead. */
function supportedHead(attention: AttentionInfo, head: Head): Head {
  if (head === "rollout" && attention.kind === "cross") return "mean";
  return typeof head === "number" ? Math.min(head, attention.heads - 1) : head;
}

function parseIndex(text: string): number {
  const number = Math.floor(Number(text));
  return Number.isFinite(number) && number >= 0 ? number : 0;
}
