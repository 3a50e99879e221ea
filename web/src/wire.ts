/** Numbers as they travel: base64 of little-endian bytes, and rows of bits. */

export function bytes(text: string): Uint8Array {
  const letters = atob(text);
  const out = new Uint8Array(letters.length);
  for (let i = 0; i < out.length; i++) out[i] = letters.charCodeAt(i);
  return out;
}

export function floats(text: string): Float32Array {
  const raw = bytes(text);
  const view = new DataView(raw.buffer);
  const out = new Float32Array(raw.length >> 2);
  for (let i = 0; i < out.length; i++) out[i] = view.getFloat32(i << 2, true);
  return out;
}

/** A table of yes and no; each row begins at a whole byte, the most significant bit first. */
export class Bits {
  private readonly stride: number;

  constructor(
    private readonly raw: Uint8Array,
    readonly rows: number,
    readonly columns: number,
  ) {
    this.stride = (columns + 7) >> 3;
    if (raw.length < rows * this.stride) {
      throw new RangeError(`${raw.length} bytes are too few for ${rows} × ${columns} bits`);
    }
  }

  static read(text: string, rows: number, columns: number): Bits {
    return new Bits(bytes(text), rows, columns);
  }

  at(row: number, column: number): boolean {
    return ((this.raw[row * this.stride + (column >> 3)] >> (7 - (column & 7))) & 1) === 1;
  }
}

/** The weight that a byte of a tile stands for: it was stored as round(255·√w). */
export function weight(byte: number): number {
  return (byte / 255) ** 2;
}
