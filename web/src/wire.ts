/** Decodes arrays in answers: base64 of little-endian bytes, and rows of bits. */

export function decodeBytes(base64: string): Uint8Array {
  const characters = atob(base64);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

export function decodeFloats(base64: string): Float32Array {
  const bytes = decodeBytes(base64);
  const view = new DataView(bytes.buffer);
  const floats = new Float32Array(bytes.length >> 2);
  for (let i = 0; i < floats.length; i++) floats[i] = view.getFloat32(i << 2, true);
  return floats;
}

/** A boolean matrix. Each row starts at a byte; the first column is its most significant bit. */
export class BitMatrix {
  private readonly stride: number;

  constructor(
    private readonly bytes: Uint8Array,
    readonly rows: number,
    readonly columns: number,
  ) {
    this.stride = (columns + 7) >> 3;
    if (bytes.length < rows * this.stride) {
      throw new RangeError(`${bytes.length} bytes are too few for ${rows} × ${columns} bits`);
    }
  }

  static decode(base64: string, rows: number, columns: number): BitMatrix {
    return new BitMatrix(decodeBytes(base64), rows, columns);
  }

  at(row: number, column: number): boolean {
    return ((this.bytes[row * this.stride + (column >> 3)] >> (7 - (column & 7))) & 1) === 1;
  }
}

/** The weight that a byte of a tile encodes as round(255·√w). */
export function weightFromByte(byte: number): number {
  return (byte / 255) ** 2;
}
