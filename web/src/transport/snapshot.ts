/** Precomputed answers, in the same file as the page. */

import type { Answer, Params, Question } from "../api.ts";
import { ApiError, canonicalJson, type Transport } from "./transport.ts";

export interface SnapshotEntry {
  question: string;
  params: unknown;
  answer: unknown;
}

export class SnapshotTransport implements Transport {
  private readonly answers = new Map<string, unknown>();
  private readonly questions = new Set<string>();

  constructor(entries: SnapshotEntry[]) {
    for (const { question, params, answer } of entries) {
      this.answers.set(question + canonicalJson(params), answer);
      this.questions.add(question);
    }
  }

  supports(question: Question): boolean {
    return this.questions.has(question);
  }

  async ask<Q extends Question>(question: Q, params: Params<Q>): Promise<Answer<Q>> {
    const answer = this.answers.get(question + canonicalJson(params));
    if (answer === undefined) {
      throw new ApiError(
        "This file contains precomputed answers only, and this is not one of them.",
        "not_in_snapshot",
      );
    }
    return answer as Answer<Q>;
  }
}
