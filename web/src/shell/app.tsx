/** The page: the model's facts, the tabs, and the selected view. */

import { useCallback, useEffect, useMemo, useState } from "preact/hooks";
import type { ModelInfo, Question, View } from "../api.ts";
import { useStore } from "../store.ts";
import { errorMessage, type Transport } from "../transport/transport.ts";
import { AttentionView } from "../views/attention/view.tsx";
import { DecodingView } from "../views/decoding/view.tsx";
import { AuditMonitor } from "../views/leaks/auditMonitor.ts";
import { LeaksView } from "../views/leaks/view.tsx";
import { MasksView } from "../views/masks/view.tsx";
import { ServerMonitor } from "../views/server/monitor.ts";
import { ServerView } from "../views/server/view.tsx";
import { TrainingView } from "../views/training/view.tsx";
import { TranslateView } from "../views/translate/view.tsx";
import { ExplorerContext, type ExplorerContextValue } from "./hooks.ts";
import { isTyping, ShortcutDialog } from "./shortcuts.tsx";
import { Tabs } from "./tabs.tsx";
import type { ThemeController } from "./theme.ts";
import type { UrlState } from "./urlState.ts";

type ModelView = Exclude<View, "server">;

const VIEWS: Record<ModelView, { component: () => preact.JSX.Element; questions: Question[] }> = {
  translate: { component: TranslateView, questions: ["translate"] },
  attention: { component: AttentionView, questions: ["attention"] },
  decoding: { component: DecodingView, questions: ["next_token", "beam"] },
  masks: { component: MasksView, questions: ["mask"] },
  leaks: { component: LeaksView, questions: ["audit", "unmasked"] },
  training: { component: TrainingView, questions: ["runs", "compare"] },
};

interface Props {
  transport: Transport;
  urlState: UrlState;
  theme: ThemeController;
  keyTarget: EventTarget; // receives key events: the document, or in a notebook the explorer's element
}

export function App({ transport, urlState, theme, keyTarget }: Props) {
  const [modelInfo, setModelInfo] = useState<ModelInfo | null>(null);
  const [error, setError] = useState("");

  useEffect(() => {
    transport.ask("model_info", {}).then(setModelInfo, (reason: unknown) => setError(errorMessage(reason)));
  }, [transport]);

  // the operator may look at the server before the model has answered, or if it does not
  const isOperator = transport.readServerStatus !== undefined;
  const isLoading = modelInfo === null && error === "";
  return (
    <>
      {error !== "" && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
      {isLoading && !isOperator && <p class="muted loading">Loading model …</p>}
      {(modelInfo !== null || isOperator) && (
        <LoadedApp {...{ transport, urlState, theme, keyTarget, modelInfo, isLoading }} />
      )}
    </>
  );
}

interface LoadedProps extends Props {
  modelInfo: ModelInfo | null; // null on the operator's page, while the model has not answered
  isLoading: boolean;
}

function LoadedApp({ transport, urlState, theme, keyTarget, modelInfo, isLoading }: LoadedProps) {
  const urlParams = useStore(urlState.params);
  const [showShortcuts, setShowShortcuts] = useState(false);
  const palette = useStore(theme.palette);
  const monitor = useMemo(() => {
    const read = transport.readServerStatus;
    return read === undefined ? null : new ServerMonitor(() => read.call(transport));
  }, [transport]);
  const views = useMemo<View[]>(
    () => [...modelViews(modelInfo, transport), ...(monitor === null ? [] : (["server"] as const))],
    [modelInfo, transport, monitor],
  );
  const view = views.find((name) => name === urlParams.view) ?? (isLoading ? undefined : views[0]);
  const selectView = useCallback(
    (name: View) => urlState.update({ view: name === views[0] && name !== "server" ? null : name }, true),
    [urlState, views],
  );
  const auditMonitor = useMemo(
    () => new AuditMonitor((params) => transport.ask("audit", params)),
    [transport],
  );
  useEffect(() => () => auditMonitor.stop(), [auditMonitor]);
  const context = useMemo<ExplorerContextValue | null>(
    () => (modelInfo === null ? null : { transport, modelInfo, urlState, theme, auditMonitor }),
    [transport, modelInfo, urlState, theme, auditMonitor],
  );

  useEffect(() => {
    const onKeyDown = (event: Event) => {
      const keyEvent = event as KeyboardEvent;
      if (keyEvent.defaultPrevented || isTyping(keyEvent)) return;
      const number = Number(keyEvent.key);
      if (number >= 1 && number <= views.length) selectView(views[number - 1]);
      else if (keyEvent.key === "?") setShowShortcuts((open) => !open);
      else if (keyEvent.key === "d") theme.toggle();
      else return;
      keyEvent.preventDefault();
    };
    keyTarget.addEventListener("keydown", onKeyDown);
    return () => keyTarget.removeEventListener("keydown", onKeyDown);
  }, [keyTarget, views, selectView, theme]);

  useEffect(() => {
    if (keyTarget === document && modelInfo !== null && modelInfo.name !== "") {
      document.title = `${modelInfo.name} – keepleft explorer`;
    }
  }, [keyTarget, modelInfo]);

  const ViewComponent = view === undefined || view === "server" ? null : VIEWS[view].component;
  return (
    <ExplorerContext.Provider value={context}>
      <header class="top">
        <div class="model-header">
          <strong class="brand">keepleft</strong>
          {modelInfo !== null && (
            <>
              <span class="model">{modelInfo.name}</span>
              <span class="muted facts">
                {modelFacts(modelInfo).map((fact) => (
                  <span key={fact}>{fact}</span>
                ))}
              </span>
            </>
          )}
        </div>
        <div class="toolbar">
          <button
            type="button"
            class="icon"
            onClick={() => theme.toggle()}
            aria-label="Toggle dark theme"
            title="Toggle dark theme (d)"
          >
            {theme.current() === "dark" && palette ? "☀" : "☾"}
          </button>
          <button
            type="button"
            class="icon"
            onClick={() => setShowShortcuts(true)}
            aria-label="Keyboard shortcuts"
            title="Keyboard shortcuts (?)"
          >
            ?
          </button>
        </div>
      </header>
      <Tabs views={views} view={view} onSelect={selectView} />
      <main>
        <div class="view" id="keepleft-panel" role="tabpanel" aria-labelledby={`keepleft-tab-${view}`}>
          {view === "server" && monitor !== null && (
            <ServerView monitor={monitor} showModelName={modelInfo === null} />
          )}
          {ViewComponent !== null && <ViewComponent key={view} />}
          {view === undefined && <p class="muted">{isLoading ? "Loading model …" : "Nothing to show."}</p>}
        </div>
      </main>
      <ShortcutDialog open={showShortcuts} onClose={() => setShowShortcuts(false)} />
    </ExplorerContext.Provider>
  );
}

/** The views of the model that this page can show. */
function modelViews(modelInfo: ModelInfo | null, transport: Transport): View[] {
  return (Object.keys(VIEWS) as ModelView[]).filter(
    (view) =>
      modelInfo?.views.includes(view) &&
      VIEWS[view].questions.some((question) => transport.supports(question)),
  );
}

function modelFacts(info: ModelInfo): string[] {
  const facts = [
    info.family,
    `${info.parameters.toLocaleString("en")} parameters`,
    `hidden size ${info.dim}`,
    `vocabulary size ${info.vocab_size.toLocaleString("en")}`,
  ];
  if (info.max_positions !== null) {
    facts.push(`max sequence length ${info.max_positions.toLocaleString("en")}`);
  }
  return facts;
}
