/** The controls of the page: one of several, a number on a scale, yes or no. */

import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

interface OneOf {
  label: string;
  options: readonly (readonly [value: string, name: string])[];
  value: string;
  onChange(value: string): void;
}

/** A few choices side by side. */
export function Segments({ label, options, value, onChange }: OneOf) {
  const group = useId();
  return (
    <div class="segments" role="radiogroup" aria-label={label}>
      {options.map(([option, name]) => (
        <label key={option} class={option === value ? "on" : ""}>
          <input type="radio" name={group} value={option} checked={option === value} onChange={() => onChange(option)} />
          <span>{name}</span>
        </label>
      ))}
    </div>
  );
}

/** Many choices in a list. */
export function Choice({ label, options, value, onChange }: OneOf) {
  return (
    <label class="choice">
      <span>{label}</span>
      <select aria-label={label} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map(([option, name]) => (
          <option key={option} value={option}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

interface Scale {
  label: string;
  value: number;
  least: number;
  most: number;
  step: number;
  shown?: string;
  hint?: string;
  onChange(value: number): void;
}

export function Slider({ label, value, least, most, step, shown, hint, onChange }: Scale) {
  return (
    <label class="slider" title={hint}>
      <span class="name">{label}</span>
      <span class="value" aria-hidden="true">
        {shown ?? String(value)}
      </span>
      <input
        type="range"
        min={least}
        max={most}
        step={step}
        value={value}
        aria-label={label}
        aria-valuetext={shown}
        onInput={(event) => onChange(Number(event.currentTarget.value))}
      />
    </label>
  );
}

export function NumberField({ label, value, least, most, onChange }: Omit<Scale, "step">) {
  return (
    <label class="choice">
      <span>{label}</span>
      <input
        type="number"
        aria-label={label}
        min={least}
        max={most}
        value={value}
        inputMode="numeric"
        onInput={(event) => {
          const typed = Math.round(Number(event.currentTarget.value));
          if (Number.isFinite(typed)) onChange(Math.max(least, Math.min(most, typed)));
        }}
      />
    </label>
  );
}

export function Switch({ label, on, onChange }: { label: string; on: boolean; onChange(on: boolean): void }) {
  return (
    <label class="switch">
      <input type="checkbox" role="switch" checked={on} onChange={(event) => onChange(event.currentTarget.checked)} />
      <span>{label}</span>
    </label>
  );
}

/** One line where something went wrong, or is under way. */
export function Notice({ error, busy, children }: { error?: string; busy?: boolean; children?: ComponentChildren }) {
  if (error)
    return (
      <p class="error" role="alert">
        {error}
      </p>
    );
  if (busy)
    return (
      <p class="quiet busy" role="status">
        {children ?? "One moment …"}
      </p>
    );
  return null;
}
