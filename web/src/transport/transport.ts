/** How the page asks the explorer: over HTTP, through a notebook widget, or from a snapshot in the file. */

import type { Answer, Params, Question, ServerStatus } from "../api.ts";

export interface Transport {
  ask<Q extends Question>(question: Q, params: Params<Q>): Promise<Answer<Q>>;
  /** True if questions of this kind can be answered at all. */
  supports(question: Question): boolean;
  /** What the server is doing; only the page of its operator has this. */
  readServerStatus?(): Promise<ServerStatus>;
}

/** An error answer: a message for the user, and a code for the page if it can react to the error. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly code: string = "",
  ) {
    super(message);
    this.name = "ApiError";
  }
}

export function errorMessage(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** The error in an answer; null if there is none. */
export function parseError(body: unknown): ApiError | null {
  if (typeof body !== "object" || body === null) return null;
  const { error, detail } = body as { error?: unknown; detail?: unknown };
  if (typeof error === "string") return new ApiError(error);
  if (typeof error === "object" && error !== null) {
    const { message, code } = error as { message?: unknown; code?: unknown };
    const text = typeof message === "string" ? message : "The server reported an error without a message.";
    return new ApiError(text, String(code ?? ""));
  }
  return typeof detail === "string" ? new ApiError(detail) : null;
}

/** JSON with sorted keys and without undefined values, so that equal parameters give equal strings. */
export function canonicalJson(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (typeof value === "object" && value !== null) {
    const entries = Object.entries(value)
      .filter(([, item]) => item !== undefined)
      .sort(([a], [b]) => (a < b ? -1 : 1));
    return `{${entries.map(([name, item]) => `${JSON.stringify(name)}:${canonicalJson(item)}`).join(",")}}`;
  }
  return JSON.stringify(value ?? null);
}
