/** Answers from a notebook: messages to the Python half of a widget, each with a number that its reply repeats. */

import type { Answer, Given, Question } from "../api.ts";
import { refusal, type Source } from "./transport.ts";

/** As much of anywidget's model as is used here. */
export interface WidgetModel {
  send(content: unknown): void;
  on(event: "msg:custom", listener: (message: unknown) => void): void;
  off?(event: "msg:custom", listener: (message: unknown) => void): void;
}

interface Waiting {
  resolve(answer: unknown): void;
  reject(error: unknown): void;
}

export class WidgetSource implements Source {
  private readonly waiting = new Map<string, Waiting>();
  private readonly own = Math.random().toString(36).slice(2); // two views of one widget hear each other's replies
  private count = 0;

  constructor(private readonly model: WidgetModel) {
    model.on("msg:custom", this.hear);
  }

  can(): boolean {
    return true;
  }

  ask<Q extends Question>(question: Q, given: Given<Q>): Promise<Answer<Q>> {
    const id = `${this.own}-${this.count++}`;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve: resolve as (answer: unknown) => void, reject });
      this.model.send({ id, question, given });
    });
  }

  close(): void {
    this.model.off?.("msg:custom", this.hear);
    this.waiting.clear();
  }

  private readonly hear = (message: unknown): void => {
    const { id, answer } = (message ?? {}) as { id?: string; answer?: unknown };
    const waiting = id === undefined ? undefined : this.waiting.get(id);
    if (id === undefined || waiting === undefined) return;
    this.waiting.delete(id);
    const error = refusal(message);
    if (error === null) waiting.resolve(answer);
    else waiting.reject(error);
  };
}
