/** Asks the Python side of a notebook widget: a message per question, with an id that the reply repeats. */

import type { Answer, Params, Question } from "../api.ts";
import { parseError, type Transport } from "./transport.ts";

/** The part of anywidget's model that is used here. */
export interface WidgetModel {
  send(content: unknown): void;
  on(event: "msg:custom", listener: (message: unknown) => void): void;
  off?(event: "msg:custom", listener: (message: unknown) => void): void;
}

interface PendingRequest {
  resolve(answer: unknown): void;
  reject(error: unknown): void;
}

export class WidgetTransport implements Transport {
  private readonly pending = new Map<string, PendingRequest>();
  // two views of one widget receive each other's replies
  private readonly clientId = Math.random().toString(36).slice(2);
  private count = 0;

  constructor(private readonly model: WidgetModel) {
    model.on("msg:custom", this.onMessage);
  }

  supports(): boolean {
    return true;
  }

  ask<Q extends Question>(question: Q, params: Params<Q>): Promise<Answer<Q>> {
    const id = `${this.clientId}-${this.count++}`;
    return new Promise((resolve, reject) => {
      this.pending.set(id, { resolve: resolve as (answer: unknown) => void, reject });
      this.model.send({ id, question, params });
    });
  }

  close(): void {
    this.model.off?.("msg:custom", this.onMessage);
    this.pending.clear();
  }

  private readonly onMessage = (message: unknown): void => {
    const { id, answer } = (message ?? {}) as { id?: string; answer?: unknown };
    const request = id === undefined ? undefined : this.pending.get(id);
    if (id === undefined || request === undefined) return;
    this.pending.delete(id);
    const error = parseError(message);
    if (error === null) request.resolve(answer);
    else request.reject(error);
  };
}
