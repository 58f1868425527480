# SPDX-License-Identifier: Apache-2.0
# DevStack plugin: the library and its command, with Glance as the image source.

function _imagebackend_has {
    [[ ",${IMAGEBACKEND_BACKENDS// /}," == *",$1,"* ]]
}

function install_imagebackend {
    local package
    for package in qemu-utils e2fsprogs xfsprogs dosfstools; do
        install_package $package
    done
    if _imagebackend_has rbd; then
        install_package python3-rados python3-rbd qemu-block-extra
    fi
    setup_dev_lib "imagebackend"
    pip_install "$IMAGEBACKEND_DIR[glance,libvirt]"
    if _imagebackend_has rbd && [[ -n "${DEVSTACK_VENV:-}" ]]; then
        "$IMAGEBACKEND_DIR"/tools/ceph_bindings "$DEVSTACK_VENV"
    fi
}

function configure_imagebackend {
    sudo install -d -o "$STACK_USER" -m 755 "$IMAGEBACKEND_CONF_DIR"
    # QEMU's own user passes through it to the disks.
    sudo install -d -o "$STACK_USER" -m 711 "$IMAGEBACKEND_STATE_PATH"
    rm -f "$IMAGEBACKEND_CONF"
    iniset "$IMAGEBACKEND_CONF" imagebackend state_path "$IMAGEBACKEND_STATE_PATH"
    iniset "$IMAGEBACKEND_CONF" imagebackend enabled_backends "$IMAGEBACKEND_BACKENDS"
    iniset "$IMAGEBACKEND_CONF" imagebackend_images source glance
    iniset "$IMAGEBACKEND_CONF" imagebackend_libvirt uri qemu:///system
    if [[ -n "$IMAGEBACKEND_DATABASE" ]]; then
        iniset "$IMAGEBACKEND_CONF" imagebackend_store connection \
            "$(database_connection_url "$IMAGEBACKEND_DATABASE")"
    fi
    if _imagebackend_has rbd; then
        iniset "$IMAGEBACKEND_CONF" rbd ceph_conf "$IMAGEBACKEND_CEPH_CONF"
        iniset "$IMAGEBACKEND_CONF" rbd user "$IMAGEBACKEND_CEPH_USER"
        iniset "$IMAGEBACKEND_CONF" rbd pools "$IMAGEBACKEND_CEPH_POOL"
        iniset "$IMAGEBACKEND_CONF" rbd image_pool "$IMAGEBACKEND_CEPH_IMAGE_POOL"
    fi
}

function create_imagebackend_accounts {
    local group=imagebackend_glance
    create_service_user imagebackend admin
    get_or_add_user_project_role service imagebackend "$SERVICE_PROJECT_NAME"
    iniset "$IMAGEBACKEND_CONF" $group auth_type password
    iniset "$IMAGEBACKEND_CONF" $group auth_url "$KEYSTONE_SERVICE_URI"
    iniset "$IMAGEBACKEND_CONF" $group username imagebackend
    iniset "$IMAGEBACKEND_CONF" $group password "$SERVICE_PASSWORD"
    iniset "$IMAGEBACKEND_CONF" $group project_name "$SERVICE_PROJECT_NAME"
    iniset "$IMAGEBACKEND_CONF" $group user_domain_name "$SERVICE_DOMAIN_NAME"
    iniset "$IMAGEBACKEND_CONF" $group project_domain_name "$SERVICE_DOMAIN_NAME"
    iniset "$IMAGEBACKEND_CONF" $group region_name "$REGION_NAME"
}

function create_imagebackend_ceph_user {
    local pool=$IMAGEBACKEND_CEPH_POOL images=$IMAGEBACKEND_CEPH_IMAGE_POOL
    local keyring=/etc/ceph/ceph.client.$IMAGEBACKEND_CEPH_USER.keyring
    sudo ceph -c "$IMAGEBACKEND_CEPH_CONF" auth get-or-create \
        "client.$IMAGEBACKEND_CEPH_USER" mon 'profile rbd' \
        mgr "profile rbd pool=$pool, profile rbd pool=$images" \
        osd "profile rbd pool=$pool, profile rbd pool=$images" |
        sudo tee "$keyring" >/dev/null
    sudo chown "$STACK_USER" "$keyring"
    sudo chmod 600 "$keyring"
}

function check_imagebackend {
    if [[ -n "$IMAGEBACKEND_DATABASE" ]]; then
        imagebackend --config-file "$IMAGEBACKEND_CONF" db upgrade
    fi
    imagebackend --config-file "$IMAGEBACKEND_CONF" config check
}

if [[ "$1" == "stack" ]]; then
    case "$2" in
    install)
        echo_summary "Installing imagebackend"
        install_imagebackend
        ;;
    post-config)
        echo_summary "Configuring imagebackend"
        configure_imagebackend
        create_imagebackend_accounts
        if [[ -n "$IMAGEBACKEND_DATABASE" ]]; then
            recreate_database "$IMAGEBACKEND_DATABASE"
        fi
        if _imagebackend_has rbd; then
            create_imagebackend_ceph_user
        fi
        ;;
    test-config)
        check_imagebackend
        ;;
    esac
elif [[ "$1" == "clean" ]]; then
    sudo rm -rf "$IMAGEBACKEND_STATE_PATH" "$IMAGEBACKEND_CONF_DIR"
fi
