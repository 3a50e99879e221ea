/** The page: what the model is, the tabs, and the view that is open. */

import { useCallback, useEffect, useMemo, useState } from "preact/hooks";
import type { About, Question, View } from "../api.ts";
import { useHeld } from "../store.ts";
import { said, type Source } from "../transport/transport.ts";
import { AttentionView } from "../views/attention/view.tsx";
import { DecodingView } from "../views/decoding/view.tsx";
import { LeaksView } from "../views/leaks/view.tsx";
import { MasksView } from "../views/masks/view.tsx";
import { TrainingView } from "../views/training/view.tsx";
import { type Page, PageContext } from "./hooks.ts";
import { KeySheet, writing } from "./shortcuts.tsx";
import type { Place } from "./urlState.ts";
import { Tabs } from "./tabs.tsx";
import type { Themed } from "./theme.ts";

const VIEWS: Record<View, { draw: () => preact.JSX.Element; needs: Question[] }> = {
  attention: { draw: AttentionView, needs: ["attention"] },
  decoding: { draw: DecodingView, needs: ["next", "beam"] },
  masks: { draw: MasksView, needs: ["mask"] },
  leaks: { draw: LeaksView, needs: ["leaks", "unmasked"] },
  training: { draw: TrainingView, needs: ["runs", "compare"] },
};

interface Props {
  source: Source;
  place: Place;
  themed: Themed;
  keys: EventTarget; // where keys are heard: the whole window, or in a notebook the page alone
}

export function App({ source, place, themed, keys }: Props) {
  const [about, setAbout] = useState<About | null>(null);
  const [error, setError] = useState("");

  useEffect(() => {
    source.ask("about", {}).then(setAbout, (wrong: unknown) => setError(said(wrong)));
  }, [source]);

  return (
    <>
      {error !== "" && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
      {about === null && error === "" && <p class="quiet loading">Asking the model who it is …</p>}
      {about !== null && <Opened {...{ source, place, themed, keys, about }} />}
    </>
  );
}

function Opened({ source, place, themed, keys, about }: Props & { about: About }) {
  const words = useHeld(place.words);
  const [sheet, setSheet] = useState(false);
  const palette = useHeld(themed.palette);
  const views = useMemo(
    () =>
      (Object.keys(VIEWS) as View[]).filter(
        (view) => about.views.includes(view) && VIEWS[view].needs.some((name) => source.can(name)),
      ),
    [about, source],
  );
  const view = views.find((name) => name === words.view) ?? views[0];
  const go = useCallback((name: View) => place.say({ view: name === views[0] ? null : name }, true), [place, views]);
  const page = useMemo<Page>(() => ({ source, about, place, themed }), [source, about, place, themed]);

  useEffect(() => {
    const hear = (event: Event) => {
      const pressed = event as KeyboardEvent;
      if (pressed.defaultPrevented || writing(pressed)) return;
      const number = Number(pressed.key);
      if (number >= 1 && number <= views.length) go(views[number - 1]);
      else if (pressed.key === "?") setSheet((open) => !open);
      else if (pressed.key === "d") themed.turn();
      else return;
      pressed.preventDefault();
    };
    keys.addEventListener("keydown", hear);
    return () => keys.removeEventListener("keydown", hear);
  }, [keys, views, go, themed]);

  useEffect(() => {
    if (keys === document && about.name !== "") document.title = `${about.name} – keepleft explorer`;
  }, [keys, about]);

  const Draw = view === undefined ? null : VIEWS[view].draw;
  return (
    <PageContext.Provider value={page}>
      <header class="top">
        <div class="who">
          <strong class="mark">keepleft</strong>
          <span class="model">{about.name}</span>
          <span class="quiet facts">
            {facts(about).map((fact) => (
              <span key={fact}>{fact}</span>
            ))}
          </span>
        </div>
        <div class="tools">
          <button type="button" class="icon" onClick={() => themed.turn()} aria-label="Dark or light" title="Dark or light (d)">
            {themed.theme() === "dark" && palette ? "☀" : "☾"}
          </button>
          <button type="button" class="icon" onClick={() => setSheet(true)} aria-label="Keys" title="Keys (?)">
            ?
          </button>
        </div>
      </header>
      <Tabs views={views} view={view} go={go} />
      <main>
        <div class="view" id="keepleft-panel" role="tabpanel" aria-labelledby={`keepleft-tab-${view}`}>
          {Draw === null ? <p class="quiet">There is nothing to show here.</p> : <Draw key={view} />}
        </div>
      </main>
      <KeySheet open={sheet} close={() => setSheet(false)} />
    </PageContext.Provider>
  );
}

function facts(about: About): string[] {
  const words = [
    about.family,
    `${about.parameters.toLocaleString("en")} weights`,
    `width ${about.dim}`,
    `${about.vocab.toLocaleString("en")} tokens known`,
  ];
  if (about.longest !== null) words.push(`at most ${about.longest.toLocaleString("en")} at a time`);
  return words;
}
