/** Form controls: choices, numbers, switches; and the status line. */

import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

interface ChoiceProps {
  label: string;
  options: readonly (readonly [value: string, name: string])[];
  value: string;
  onChange(value: string): void;
}

export function SegmentedControl({ label, options, value, onChange }: ChoiceProps) {
  const group = useId();
  return (
    <div class="segments" role="radiogroup" aria-label={label}>
      {options.map(([option, name]) => (
        <label key={option} class={option === value ? "selected" : ""}>
          <input
            type="radio"
            name={group}
            value={option}
            checked={option === value}
            onChange={() => onChange(option)}
          />
          <span>{name}</span>
        </label>
      ))}
    </div>
  );
}

export function Select({ label, options, value, onChange }: ChoiceProps) {
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

interface NumberProps {
  label: string;
  value: number;
  min: number;
  max: number;
  step: number;
  valueText?: string;
  hint?: string;
  onChange(value: number): void;
}

export function Slider({ label, value, min, max, step, valueText, hint, onChange }: NumberProps) {
  return (
    <label class="slider" title={hint}>
      <span class="name">{label}</span>
      <span class="value" aria-hidden="true">
        {valueText ?? String(value)}
      </span>
      <input
        type="range"
        min={min}
        max={max}
        step={step}
        value={value}
        aria-label={label}
        aria-valuetext={valueText}
        onInput={(event) => onChange(Number(event.currentTarget.value))}
      />
    </label>
  );
}

export function NumberField({ label, value, min, max, onChange }: Omit<NumberProps, "step">) {
  return (
    <label class="choice">
      <span>{label}</span>
      <input
        type="number"
        aria-label={label}
        min={min}
        max={max}
        value={value}
        inputMode="numeric"
        onInput={(event) => {
          const number = Math.round(Number(event.currentTarget.value));
          if (Number.isFinite(number)) onChange(Math.max(min, Math.min(max, number)));
        }}
      />
    </label>
  );
}

interface SwitchProps {
  label: string;
  checked: boolean;
  onChange(checked: boolean): void;
}

export function Switch({ label, checked, onChange }: SwitchProps) {
  return (
    <label class="switch">
      <input
        type="checkbox"
        role="switch"
        checked={checked}
        onChange={(event) => onChange(event.currentTarget.checked)}
      />
      <span>{label}</span>
    </label>
  );
}

interface StatusProps {
  error?: string;
  isLoading?: boolean;
  children?: ComponentChildren; // instead of "Loading …"
}

/** A line for an error, or for loading; otherwise nothing. */
export function Status({ error, isLoading, children }: StatusProps) {
  if (error)
    return (
      <p class="error" role="alert">
        {error}
      </p>
    );
  if (isLoading)
    return (
      <p class="muted busy" role="status">
        {children ?? "Loading …"}
      </p>
    );
  return null;
}
