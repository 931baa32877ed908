# Structures of .dqkv files, version 1.0, for Kaitai Struct (https://kaitai.io).  dqkv.md is the specification; the
# numbers in the docs below are its clauses.
#
# Described: the header block with all its sections, the record log, tables of records, INDEX and trailer.  Not described,
# because Kaitai Struct has no means for them: CRC32C (3.1, 4.1), what a sequence is made of (4.2), pages (5), the decoder (6).
meta:
  id: dqkv
  title: D-Quant KV cache
  file-extension: dqkv
  license: Apache-2.0
  endian: le
  bit-endian: le
doc-ref: dqkv.md
seq:
  - id: header
    type: header
  - id: log
    type: log_entry
    repeat: eos
    doc: Clause 2. The last entry is a remainder if the file was not closed.
types:
  header:
    doc: Clause 3.1. A parser that has read `start` may trust no other number before it has checked the CRC.
    seq:
      - id: start
        type: start
      - id: profiles
        type: profile
        repeat: expr
        repeat-expr: start.num_profiles
      - id: layers
        type: layer(_index)
        repeat: expr
        repeat-expr: start.num_layers
      - id: tables
        type: letter_table
        repeat: expr
        repeat-expr: start.num_tables
      - id: sign_vectors
        type: sign_vector
        repeat: expr
        repeat-expr: start.num_signs
      - id: classes
        type: level_class
        repeat: expr
        repeat-expr: start.num_classes
      - id: groupings
        type: grouping
        repeat: expr
        repeat-expr: start.num_groupings
      - id: json
        type: str
        size: start.len_json
        encoding: UTF-8
        doc: Clause 3.6.
      - id: padding
        size: start.len_block - start.ofs_json - start.len_json
    instances:
      coded_layers:
        value: layers.last.count.coded
      head_groups:
        value: layers.last.count.groups
        doc: Of all coded layers together, clause 4.3.
      exact_layers:
        value: layers.last.count.exact
      window:
        value: 'start.num_profiles == 0 ? 0 : profiles[0].window'
  start:
    doc: Clause 3.1.
    seq:
      - id: signature
        contents: [0x89, DQK, 0x0d, 0x0a, 0x1a, 0x0a]
      - id: major
        type: u2
        valid: 1
      - id: minor
        type: u2
      - id: len_block
        type: u4
        valid:
          expr: _ >= 4096 and _ <= 16777216 and _ % 4096 == 0
      - id: required_features
        type: u8
        valid: 0
      - id: optional_features
        type: u8
      - id: salt
        size: 8
        doc: First half of the file id.
      - id: file_id_rest
        size: 8
      - id: num_layers
        type: u4
        valid:
          min: 1
          max: 1024
      - id: num_sequences
        type: u4
        valid:
          min: 1
          max: 65536
      - id: num_profiles
        type: u4
        valid:
          max: 8192
      - id: num_tables
        type: u4
        valid:
          max: 2048
      - id: num_signs
        type: u4
        valid:
          max: num_profiles
      - id: sinks
        type: u4
      - id: recent
        type: u4
      - id: ofs_profiles
        type: u4
        valid: 128
      - id: ofs_layers
        type: u4
        valid:
          expr: _ == ofs_profiles + 192 * num_profiles
      - id: ofs_tables
        type: u4
        valid:
          expr: _ == ofs_layers + 32 * num_layers
      - id: ofs_signs
        type: u4
      - id: ofs_json
        type: u4
        valid:
          max: len_block
      - id: len_json
        type: u4
        valid:
          expr: _ <= 65536 and ofs_json + _ <= len_block
      - id: num_classes
        type: u4
        valid:
          max: 1024
      - id: num_groupings
        type: u4
        valid:
          expr: _ <= 2 * num_profiles
      - id: ofs_classes
        type: u4
      - id: ofs_groupings
        type: u4
      - id: num_matrices
        type: u4
        valid: 0
      - id: reserved
        type: u4
        valid: 0
      - id: crc
        type: u4
  profile:
    doc: Clause 3.2.
    seq:
      - id: heads
        type: u4
        valid:
          min: 1
          max: 1024
      - id: head_size
        type: u4
        valid:
          min: 1
          max: 1024
      - id: window
        type: u4
        valid:
          expr: _ >= 32 and _ <= 4096 and _ % 32 == 0
      - id: reserved
        contents: [0, 0, 0, 0]
      - id: name
        type: strz
        size: 32
        encoding: UTF-8
      - id: reserved_2
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
      - id: key
        type: stream
      - id: value
        type: stream
  stream:
    doc: Clause 3.2, per kind.
    seq:
      - id: coder
        type: u1
        enum: coder
        valid:
          in-enum: true
      - id: quantiser
        type: u1
        enum: quantiser
        valid:
          in-enum: true
      - id: grid
        type: u1
        enum: grid
        valid:
          in-enum: true
      - id: symbols_of_letter
        type: u1
        valid:
          max: 4
      - id: levels
        type: u1
        valid:
          max: 64
      - id: precision
        type: u1
        valid:
          max: 15
      - id: substreams
        type: u1
        valid:
          any-of: [1, 2, 4]
      - id: mean_mode
        type: u1
        valid:
          max: 1
      - id: words
        type: u2
        valid:
          min: 2
          max: 32767
      - id: table
        type: u2
      - id: rotation
        type: u1
        enum: rotation
        valid:
          in-enum: true
      - id: reserved
        contents: [0]
      - id: sign_vector
        type: u2
      - id: step
        type: f8
      - id: gain
        type: u1
        enum: gain
        valid:
          in-enum: true
      - id: reserved_2
        contents: [0]
      - id: grouping
        type: u2
      - id: escape
        type: u1
        valid: 0
      - id: reserved_3
        contents: [0]
      - id: matrix
        type: u2
        valid: 0
      - id: reserved_4
        size: 32
  layer:
    doc: Clause 3.3.
    params:
      - id: place
        type: s4
    seq:
      - id: storage
        type: u1
        enum: storage
        valid:
          in-enum: true
      - id: dtype
        type: u1
        enum: dtype
        valid:
          in-enum: true
      - id: profile
        type: u2
      - id: heads
        type: u4
        valid:
          min: 1
          max: 1024
      - id: head_size
        type: u4
        valid:
          min: 1
          max: 1024
      - id: number
        type: u4
      - id: head_groups
        type: u2
        valid:
          expr: '(_ > 0) == (storage == storage::coded) and _ <= heads'
      - id: reserved
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
      - id: count
        type: >-
          layer_count(
            (place == 0 ? 0 : _parent.as<header>.layers[place - 1].count.coded) + (storage == storage::coded ? 1 : 0),
            (place == 0 ? 0 : _parent.as<header>.layers[place - 1].count.exact) + (storage == storage::exact ? 1 : 0),
            (place == 0 ? 0 : _parent.as<header>.layers[place - 1].count.groups) + head_groups)
        size: 0
        doc: No bytes; coded layers, exact layers and head groups up to this layer, which records' tables need.
  layer_count:
    params:
      - id: coded
        type: s4
      - id: exact
        type: s4
      - id: groups
        type: s4
  letter_table:
    doc: Clause 3.4.
    seq:
      - id: num_letters
        type: u4
        valid:
          min: 2
          max: 4096
      - id: precision
        type: u4
        valid:
          min: 8
          max: 15
      - id: frequencies
        type: u2
        repeat: expr
        repeat-expr: num_letters
      - id: padding
        size: (8 - (8 + 2 * num_letters) % 8) % 8
  sign_vector:
    doc: Clause 3.5.
    seq:
      - id: num_bits
        type: u4
        valid:
          max: 65536
      - id: reserved
        contents: [0, 0, 0, 0]
      - id: bits
        size: (num_bits + 7) / 8
      - id: padding
        size: (8 - (num_bits + 7) / 8 % 8) % 8
  level_class:
    doc: Clause 3.7.
    seq:
      - id: largest
        type: u1
        valid:
          min: 1
          max: 127
      - id: dependent
        type: u1
        valid:
          max: 1
      - id: gain
        type: u2
        valid:
          min: 1
          max: 1023
      - id: frequencies
        type: u2
        repeat: expr
        repeat-expr: (largest + 1) * (1 + dependent)
      - id: padding
        size: (8 - (4 + 2 * (largest + 1) * (1 + dependent)) % 8) % 8
  grouping:
    doc: Clause 3.8.
    seq:
      - id: heads
        type: u2
        valid:
          min: 1
          max: 1024
      - id: head_size
        type: u2
        valid:
          min: 1
          max: 1024
      - id: num_coded
        type: u2
        valid:
          min: 1
          max: head_size
      - id: num_groups
        type: u2
        valid:
          min: 1
          max: 512
      - id: num_tables
        type: u1
        valid:
          min: 1
          max: 16
      - id: quantiser
        type: u1
        enum: quantiser
        valid:
          in-enum: true
      - id: reserved
        contents: [0, 0, 0, 0, 0, 0]
      - id: tables
        type: group_table
        repeat: expr
        repeat-expr: num_tables
      - id: shapes
        type: group_shape
        repeat: expr
        repeat-expr: num_groups
      - id: head_order
        type: u2
        repeat: expr
        repeat-expr: heads
      - id: table_of_group
        size: num_groups
        repeat: expr
        repeat-expr: heads
      - id: channels
        type: channel_list(num_coded, head_size > 256)
        repeat: expr
        repeat-expr: heads
      - id: padding
        size: >-
          (8 - (16 + 12 * num_tables + 2 * num_groups + 2 * heads + heads * num_groups
          + heads * num_coded * (head_size > 256 ? 2 : 1)) % 8) % 8
  group_table:
    seq:
      - id: precision
        type: u1
        valid:
          min: 8
          max: 14
      - id: num_fields
        type: u1
        valid:
          min: 1
          max: 4
      - id: reserved
        contents: [0, 0]
      - id: classes
        type: u2
        repeat: expr
        repeat-expr: 4
  group_shape:
    seq:
      - id: letters
        type: u1
        valid:
          min: 1
          max: 8
      - id: fields
        type: u1
        valid:
          min: 1
          max: 4
  channel_list:
    params:
      - id: num
        type: u2
      - id: wide
        type: bool
    seq:
      - id: places
        type:
          switch-on: wide
          cases:
            true: u2
            false: u1
        repeat: expr
        repeat-expr: num

  log_entry:
    doc: Clause 2. A record that is all there, or the remainder of a file behind its last one.
    seq:
      - id: record
        type: record
        if: is_record
      - id: remainder
        size-eos: true
        if: not is_record
    instances:
      room:
        value: _io.size - _io.pos
      peek:
        pos: _io.pos
        type: record_start
        if: room >= 64
      is_record:
        value: >-
          room >= 64 and peek.magic == 0x524b5144 and peek.salt == _root.header.start.salt
          and peek.len_payload < room and (64 + peek.len_payload + 4095) / 4096 * 4096 <= room
  record_start:
    doc: Enough of a record header to know whether the record is there.
    seq:
      - id: magic
        type: u4
      - id: type_and_version
        type: u4
      - id: len_payload
        type: u8
      - id: between
        size: 24
      - id: salt
        size: 8
  record:
    doc: Clauses 4.1 to 4.8.
    seq:
      - id: header
        type: record_header
      - id: payload
        size: header.len_payload
        type:
          switch-on: header.type
          cases:
            'record_type::pages': pages
            'record_type::rows': rows
            'record_type::index': index
      - id: padding
        size: (4096 - (64 + header.len_payload) % 4096) % 4096
  record_header:
    doc: Clause 4.1.
    seq:
      - id: magic
        contents: DQKR
      - id: type
        type: u2
        enum: record_type
      - id: version
        type: u2
      - id: len_payload
        type: u8
      - id: first_token
        type: u8
      - id: num_tokens
        type: u4
      - id: sequence
        type: u4
      - id: number
        type: u4
      - id: flags
        type: u4
      - id: salt
        size: 8
      - id: epoch
        type: u4
      - id: table_crc
        type: u4
      - id: reserved
        contents: [0, 0, 0, 0]
      - id: crc
        type: u4
  pages:
    doc: Clause 4.3. Sizes of pages follow from profiles (5.1).
    seq:
      - id: crcs
        type: u4
        repeat: expr
        repeat-expr: num_windows * _root.header.head_groups
      - id: padding
        size: (64 - 4 * num_windows * _root.header.head_groups % 64) % 64
      - id: pages
        size-eos: true
    instances:
      num_windows:
        value: (_parent.as<record>.header.num_tokens + _root.header.window - 1) / _root.header.window
  rows:
    doc: Clause 4.4.
    seq:
      - id: entries
        type: rows_entry
        repeat: expr
        repeat-expr: num_entries
      - id: padding
        size: (64 - 16 * num_entries % 64) % 64
      - id: blocks
        type: rows_block(entries[_index].len_block)
        repeat: expr
        repeat-expr: num_entries
    instances:
      num_entries:
        value: >-
          2 * (_root.header.exact_layers + (_parent.as<record>.header.flags == 1 ? 0 : _root.header.coded_layers))
  rows_entry:
    seq:
      - id: encoding
        type: u1
      - id: reserved
        contents: [0, 0, 0]
      - id: crc
        type: u4
      - id: len_block
        type: u8
        valid:
          min: 1
  rows_block:
    params:
      - id: len
        type: u8
    seq:
      - id: stored
        size: len
      - id: padding
        size: (64 - len % 64) % 64
  index:
    doc: Clause 4.5.
    seq:
      - id: headers
        type: record_header
        repeat: expr
        repeat-expr: trailer.num_records
      - id: zeros
        size: _io.size - 64 - 64 * trailer.num_records
    instances:
      trailer:
        pos: _io.size - 64
        type: trailer
  trailer:
    doc: Clause 4.5.
    seq:
      - id: magic
        contents: DQKT
      - id: version
        type: u2
      - id: reserved
        contents: [0, 0]
      - id: ofs_index
        type: u8
      - id: len_file
        type: u8
      - id: salt
        size: 8
      - id: epoch
        type: u4
      - id: num_records
        type: u4
        valid:
          expr: _ <= (_io.size - 64) / 64
      - id: reserved_2
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
      - id: crc
        type: u4
enums:
  coder:
    1: rans
    2: prefix
  quantiser:
    0: none
    1: trellis_4
    2: trellis_8
  grid:
    0: min_max
    1: mid_tread
  rotation:
    0: grouped
    1: hadamard
  gain:
    0: least_squares
    1: nearly_unbiased
  storage:
    1: coded
    2: exact
    3: absent
  dtype:
    1: bfloat16
    2: float16
    3: float32
  record_type:
    1: pages
    2: rows
    3: rewind
    0x8001: index
    0x8002: note
    0x8003: fill
