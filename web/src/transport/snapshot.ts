/** Answers recorded beforehand, in the same file as the page. */

import type { Answer, Given, Question } from "../api.ts";
import { canonical, Refused, type Source } from "./transport.ts";

export interface Recording {
  question: string;
  given: unknown;
  answer: unknown;
}

export class RecordedSource implements Source {
  private readonly answers = new Map<string, unknown>();
  private readonly questions = new Set<string>();

  constructor(recordings: Recording[]) {
    for (const { question, given, answer } of recordings) {
      this.answers.set(question + canonical(given), answer);
      this.questions.add(question);
    }
  }

  can(question: Question): boolean {
    return this.questions.has(question);
  }

  async ask<Q extends Question>(question: Q, given: Given<Q>): Promise<Answer<Q>> {
    const answer = this.answers.get(question + canonical(given));
    if (answer === undefined) {
      throw new Refused("This file holds answers recorded beforehand, and this one is not among them.", "unrecorded");
    }
    return answer as Answer<Q>;
  }
}
