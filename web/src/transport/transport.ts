/** Where answers come from. The page knows this interface alone; http, widget and recorded are its three carriers. */

import type { Answer, Given, Question } from "../api.ts";

export interface Source {
  ask<Q extends Question>(question: Q, given: Given<Q>): Promise<Answer<Q>>;
  /** Is there any answer to this question at all? */
  can(question: Question): boolean;
}

/** An answer that is an error: one sentence for the reader, and a word for the page where it can do something about it. */
export class Refused extends Error {
  constructor(
    message: string,
    readonly code: string = "",
  ) {
    super(message);
    this.name = "Refused";
  }
}

/** What an error says, for one line on the page. */
export function said(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** The error in an answer, if it is one. */
export function refusal(body: unknown): Refused | null {
  if (typeof body !== "object" || body === null) return null;
  const { error, detail } = body as { error?: unknown; detail?: unknown };
  if (typeof error === "string") return new Refused(error);
  if (typeof error === "object" && error !== null) {
    const { message, code } = error as { message?: unknown; code?: unknown };
    return new Refused(typeof message === "string" ? message : "the server refused, and did not say why", String(code ?? ""));
  }
  return typeof detail === "string" ? new Refused(detail) : null;
}

/** JSON with sorted keys and without what is undefined: the same for the same question. */
export function canonical(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (typeof value === "object" && value !== null) {
    const entries = Object.entries(value)
      .filter(([, part]) => part !== undefined)
      .sort(([a], [b]) => (a < b ? -1 : 1));
    return `{${entries.map(([name, part]) => `${JSON.stringify(name)}:${canonical(part)}`).join(",")}}`;
  }
  return JSON.stringify(value ?? null);
}
